"""Decode the frames of the gauge (layout: firmware/frame.h)."""

import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

SYNC = 0xA7
LAYOUT = struct.Struct(">BBBBIhBB")
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
CRC_POLYNOMIAL = 0x2F
CRC_START = 0xFF

FLAG_NAMES = {0x01: "battery", 0x02: "encoder", 0x04: "frozen", 0x80: "restart"}


@dataclass(frozen=True)
class Reading:
    ident: int
    sequence: int
    time: datetime
    level_mm: int
    flags: tuple = ()


def crc8(data):
    """The check byte: CRC-8 with the polynomial above, no reflection, no final xor."""
    value = CRC_START
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value << 1) ^ CRC_POLYNOMIAL if value & 0x80 else value << 1
            value &= 0xFF
    return value


def encode(reading):
    """The frame of a reading, as the gauge would send it."""
    flags = sum(bit for bit, name in FLAG_NAMES.items() if name in reading.flags)
    seconds = int((reading.time - EPOCH).total_seconds())
    body = LAYOUT.pack(SYNC, reading.ident, reading.sequence, flags, seconds, reading.level_mm, 0, 0)[:-1]
    return body + bytes([crc8(body)])


def decode_frame(frame):
    """A Reading, or None when the check byte is wrong."""
    if len(frame) != LAYOUT.size or frame[0] != SYNC or crc8(frame[:-1]) != frame[-1]:
        return None
    _, ident, sequence, flags, seconds, level, _, _ = LAYOUT.unpack(frame)
    names = tuple(name for bit, name in FLAG_NAMES.items() if flags & bit)
    return Reading(ident, sequence, EPOCH + timedelta(seconds=seconds), level, names)


class FrameReader:
    """Finds frames in a stream of bytes and counts what it had to skip."""

    def __init__(self):
        self.buffer = bytearray()
        self.skipped_bytes = 0
        self.lost_frames = 0
        self._last = {}

    def feed(self, data):
        """Take in more bytes and return the readings they complete."""
        self.buffer += data
        readings = []
        while len(self.buffer) >= LAYOUT.size:
            reading = decode_frame(bytes(self.buffer[: LAYOUT.size]))
            if reading is None:
                del self.buffer[0]
                self.skipped_bytes += 1
                continue
            del self.buffer[: LAYOUT.size]
            self._count_gap(reading)
            readings.append(reading)
        return readings

    def _count_gap(self, reading):
        last = self._last.get(reading.ident)
        if last is not None and "restart" not in reading.flags:
            self.lost_frames += (reading.sequence - last - 1) % 256
        self._last[reading.ident] = reading.sequence
