"""The process in which a chat template is tried; it reads a JSON object and answers by how it ends.

Run as a script with no path of the package, so that nothing but jinja2 is imported.
"""

import json
import resource
import sys
from typing import Any


def main() -> int:
    """0, or the number for too much memory; a signal ends what computes too long."""
    task = json.load(sys.stdin)
    cpu_seconds, memory, longest, too_large = task["limits"]

    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The tag by which templates mark what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: "2026-01-01"
        template = environment.from_string(task["template"])
        for messages in task["conversations"]:
            if not fits(template, messages, longest):
                return too_large  # type: ignore[no-any-return]
    except MemoryError:
        return too_large  # type: ignore[no-any-return]
    except Exception:
        return 0
    return 0


def fits(template: Any, messages: list[dict[str, str]], longest: int) -> bool:
    """Whether a conversation is rendered in a text of bounded length; one that is refused is."""
    left = longest
    try:
        for piece in template.generate(
            messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        ):
            left -= len(piece)
            if left < 0:
                return False
    except MemoryError:
        raise
    except Exception:
        return True
    return True


if __name__ == "__main__":
    sys.exit(main())
