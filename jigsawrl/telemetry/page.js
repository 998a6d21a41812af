"use strict";
(() => {
  document.documentElement.classList.add("js");
  const line = document.getElementById("timeline");
  if (!line) return;
  const seconds = Number(line.dataset.seconds), cells = Number(line.dataset.cells), tall = Number(line.dataset.tall);
  const steps = JSON.parse(document.getElementById("steps").textContent);
  const tip = document.getElementById("tip"), whole = document.getElementById("whole");
  const drawings = [...line.querySelectorAll("svg")], ticks = line.querySelector(".ticks");
  const marks = [...line.querySelectorAll(".mark")];
  let from = 0, to = seconds;

  for (const title of line.querySelectorAll("svg title")) title.remove();  // the tip says more

  const two = (n) => String(n).padStart(2, "0");
  const clock = (t) => {
    const s = Math.round(t), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
    return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
  };
  const figure = (t, step) => (step >= 60 ? clock(t) : `${Number(t.toFixed(6))} s`);
  const precise = (t, unit) => (seconds >= 600 && unit >= 0.5 ? clock(t) : `${t.toFixed(unit < 0.01 ? 3 : unit < 0.1 ? 2 : 1)} s`);
  const roundTime = (least) => {
    for (let power = -6; power < 2; power++)
      for (const digit of [1, 2, 5]) {
        const step = digit * 10 ** power;
        if (step < 60 && step >= least) return step;
      }
    for (const minutes of [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440]) if (60 * minutes >= least) return 60 * minutes;
    return 86400 * Math.ceil(least / 86400);
  };

  const show = (a, b) => {
    [from, to] = [a, b];
    const x = (a / seconds) * cells, wide = ((b - a) / seconds) * cells;
    for (const drawing of drawings) drawing.setAttribute("viewBox", `${x} 0 ${wide} ${tall}`);
    const step = roundTime((b - a) / 10);
    ticks.replaceChildren();
    for (let n = Math.ceil(a / step - 1e-9); n * step <= b; n++) {
      const tick = document.createElement("span");
      tick.className = "tick";
      tick.style.left = `${(100 * (n * step - a)) / (b - a)}%`;
      tick.textContent = figure(n * step, step);
      ticks.append(tick);
    }
    for (const mark of marks) {
      const place = (mark.dataset.t - a) / (b - a);
      mark.style.left = `${100 * place}%`;
      mark.hidden = place < 0 || place > 1;
    }
    whole.hidden = a <= 0 && b >= seconds;
  };

  const pieces = new WeakMap();
  const piecesOf = (path) => {
    if (!pieces.has(path)) {
      const found = [...path.getAttribute("d").matchAll(/M(\S+) (\S+?)h(\S+?)v(\S+?)h/g)];
      pieces.set(path, found.map((piece) => piece.slice(1).map(Number)));
    }
    return pieces.get(path);
  };
  const pieceAt = (path, x) => {
    const every = piecesOf(path);
    let low = 0, high = every.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (every[middle][0] <= x) low = middle;
      else high = middle - 1;
    }
    return every[low];
  };
  const timeAt = (event) => {
    const box = ticks.getBoundingClientRect();
    return from + (to - from) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const said = (event) => {
    const path = event.target.closest("path"), row = event.target.closest(".row");
    if (!path || !row) return "";
    const t = timeAt(event), unit = seconds / cells, piece = pieceAt(path, t / unit);
    const [begin, end] = [piece[0] * unit, (piece[0] + piece[2]) * unit];
    const when = `${precise(begin, unit)} to ${precise(end, unit)}, ${precise(end - begin, Math.min(unit, 0.09))}`;
    if (row.classList.contains("bubble")) return `bubble: ${path.dataset.kind}\n${when}`;
    const step = (steps[row.dataset.who] || []).find(([, t0, t1]) => t0 <= t && t <= t1);
    const part = Math.round((100 * piece[3]) / tall);
    const share = part < 100 ? `\n${part <= 20 ? "at most 20" : part} % of the worker` : "";
    return `${row.dataset.who}: ${path.dataset.kind}${step ? `, step ${step[0]}` : ""}\n${when}${share}`;
  };

  let drag = null;
  const zoom = document.createElement("div");
  zoom.id = "zoom";
  line.addEventListener("pointermove", (event) => {
    if (drag !== null) {
      const outer = line.getBoundingClientRect(), box = ticks.getBoundingClientRect();
      const place = (t) => box.left - outer.left + (box.width * (t - from)) / (to - from);
      const [a, b] = [drag, timeAt(event)].sort((one, other) => one - other);
      zoom.style.left = `${place(a)}px`;
      zoom.style.width = `${place(b) - place(a)}px`;
      line.append(zoom);
    }
    const text = drag === null ? said(event) : "";
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
  });
  line.addEventListener("pointerleave", () => (tip.hidden = true));
  line.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType === "mouse" && event.target.closest(".tracks")) drag = timeAt(event);
  });
  addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const [a, b] = [drag, timeAt(event)].sort((one, other) => one - other);
    drag = null;
    zoom.remove();
    if (b - a > (to - from) / 200) show(a, Math.max(b, a + (16 * seconds) / cells));
  });
  whole.addEventListener("click", () => show(0, seconds));

  const picks = [...document.querySelectorAll(".tools .pick")];
  for (const pick of picks)
    pick.addEventListener("click", () => {
      const on = !pick.classList.contains("on");
      for (const other of picks) other.classList.toggle("on", on && other === pick);
      for (const row of line.querySelectorAll(".row.track"))
        row.style.opacity = on && !row.classList.contains(pick.dataset.of) ? 0.12 : "";
    });
  line.dataset.ready = "";
})();
