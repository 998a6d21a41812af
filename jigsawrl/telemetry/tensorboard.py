"""TensorBoard files, written so that a kill loses nothing that was logged."""

import os
import socket
import struct
import time
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from jigsawrl import durable


class TensorBoard:
    """One event file per process; each step is one record in one unbuffered write.

    tensorboardX's own SummaryWriter passes events through a queue and a thread, where a kill loses them; so only its
    messages and checksums are used here. `purge_step` tells TensorBoard to forget what earlier files of the folder
    say about that step and later ones.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names: by start, to the nanosecond.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds}.{nanoseconds:09d}.{socket.gethostname()}"
        self._path = folder / name
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, values: dict[str, float]) -> None:
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = length + _checksum(length) + data + _checksum(data)
        durable.append(self._file, record, self._path)

    def close(self) -> None:
        os.close(self._file)


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
