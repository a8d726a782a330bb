"""Settings: defaults, the TOML file, and the checks on both."""

import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

CONFIG_VARIABLE = "TIDEGAUGE_CONFIG"
DEFAULT_FILE = "tidegauge.toml"


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of range."""


@dataclass
class Station:
    name: str = "unnamed"
    ident: int = 1
    zero_offset_mm: int = 0


@dataclass
class Filter:
    window: int = 11
    max_jump_mm: int = 250


@dataclass
class Alarm:
    warn_mm: int = 5500
    flood_mm: int = 6000
    hold_minutes: int = 10
    clear_mm: int = 120


@dataclass
class Store:
    path: str = "tide.db"
    keep_days: int = 365


@dataclass
class Config:
    station: Station = field(default_factory=Station)
    filter: Filter = field(default_factory=Filter)
    alarm: Alarm = field(default_factory=Alarm)
    store: Store = field(default_factory=Store)

    def check(self):
        if not 1 <= self.station.ident <= 250:
            raise ConfigError("station.ident must be between 1 and 250")
        if self.filter.window % 2 == 0 or not 3 <= self.filter.window <= 99:
            raise ConfigError("filter.window must be odd and between 3 and 99")
        if self.alarm.warn_mm >= self.alarm.flood_mm:
            raise ConfigError("alarm.warn_mm must be below alarm.flood_mm")
        if self.store.keep_days < 30:
            raise ConfigError("store.keep_days must be at least 30")
        return self


def load(path=None):
    """Read the settings from path, the variable or the default file; all may be missing."""
    name = path or os.environ.get(CONFIG_VARIABLE) or DEFAULT_FILE
    file = Path(name)
    if not file.exists():
        if path:
            raise ConfigError(f"no such file: {path}")
        return Config().check()
    with file.open("rb") as stream:
        return from_dict(tomllib.load(stream))


def from_dict(tables):
    config = Config()
    known = {f.name for f in fields(config)}
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ConfigError(f"unknown table [{name}]")
        section = getattr(config, name)
        for key, value in table.items():
            if not hasattr(section, key):
                raise ConfigError(f"unknown setting {name}.{key}")
            if type(value) is not type(getattr(section, key)):
                raise ConfigError(f"{name}.{key} has the wrong type")
            setattr(section, key, value)
    return config.check()
