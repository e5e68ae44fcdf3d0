"""What a device can do: memory, speed and links, as data. Those that come with Meshwright are in ``meshwright/hardware``."""

import difflib
import re
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from meshwright.errors import ConfigError, Problems, Refusal
from meshwright.paths import nearby

__all__ = ["Hardware", "known_hardware", "load_hardware", "name_of"]


@dataclass(frozen=True)
class Hardware:
    """A device, and how devices are connected.

    Attributes:
        name: of the device.
        memory_gib: memory of a device, in GiB, as torch reports it.
        reserved_gib: memory that no tensor can have: context, workspaces, buffers of the communication library.
        bf16_tflops: peak of dense matrix products in bf16, in 10^12 operations a second.
        fp32_tflops: the same in fp32.
        achievable: share of these peaks which large matrix products reach.
        attention: share of the peak in the dtype of compute which attention reaches.
        hbm_tb_s: bandwidth of the memory, in 10^12 bytes a second.
        gpus_per_node: devices that are connected by fast links.
        link_gb_s: bandwidth of a device to the others of its node, one way, in 10^9 bytes a second.
        link_us: latency of a step of a collective inside a node, in microseconds.
        nic_gb_s: bandwidth of a device to other nodes, in 10^9 bytes a second.
        nic_us: latency of a step of a collective between nodes, in microseconds.
        host_gb_s: bandwidth between a device and its host, one way, in 10^9 bytes a second.
        launch_us: time in which the host starts an operator, in microseconds.
        overlap: share of what FSDP2's order lets compute hide (:mod:`meshwright.trace.in_time.fsdp_replay`) that is hidden.
        beyond: time of a step beyond what its parts take, as a share of them: measured by `meshwright calibrate` on a step of
            some layers; may be left out.
        calibrated: whether the values were measured on the machine (`meshwright calibrate`); may be left out.
        torch_name: what torch calls the device (``torch.cuda.get_device_name``); may be left out.
        remarks: what a forecast cannot know of the device, a sentence each; may be left out.
    """

    name: str
    memory_gib: float
    reserved_gib: float
    bf16_tflops: float
    fp32_tflops: float
    achievable: float
    attention: float
    hbm_tb_s: float
    gpus_per_node: int
    link_gb_s: float
    link_us: float
    nic_gb_s: float
    nic_us: float
    host_gb_s: float
    launch_us: float
    overlap: float
    beyond: float = 0.0
    calibrated: bool = False
    torch_name: str = ""
    remarks: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Return the peak of products in a dtype, in 10^12 operations a second."""
        return self.fp32_tflops if dtype in ("float32", "float64") else self.bf16_tflops


def known_hardware() -> list[str]:
    """Return the names of the devices that come with Meshwright."""
    files = (resources.files("meshwright") / "hardware").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def name_of(torch_name: str) -> str | None:
    """Return the name of the device that torch calls so; ``None``: none that comes with Meshwright."""
    return next((name for name in known_hardware() if load_hardware(name).torch_name == torch_name), None)


def load_hardware(name: str, option: str = "--gpu") -> Hardware:
    """Return a device, by name or from a YAML file that has the attributes of :class:`Hardware`.

    Args:
        name: name of a device, or path of a file.
        option: what the name was given for, for errors.

    Raises:
        ConfigError: there is no such device or file, or the file lacks a value, has an unknown key, or a value that is no
            positive number.
    """
    where = f"{option}={name}"
    if name in known_hardware():
        text = (resources.files("meshwright") / "hardware" / f"{name}.yaml").read_text()
    elif Path(name).is_file():
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("hardware.file", f"{where}: cannot be read as text ({error})") from error
    else:
        near = _near(name) or ";"
        raise ConfigError(
            "hardware.name", f"{where}: unknown{near} legal are {', '.join(known_hardware())}, or the path of a YAML file"
        )
    try:
        values: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("hardware.file", f"{where}: is no YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise ConfigError("hardware.file", f"{where}: must be a mapping of keys to values")
    names = [item.name for item in fields(Hardware)]
    optional = ("beyond", "calibrated", "torch_name", "remarks")
    problems = Problems(
        Refusal("hardware.value", f"{where}: {key} is missing") for key in names if key not in (*values, *optional)
    )
    problems += [
        Refusal("hardware.value", f"{where}: {key}: unknown key; legal are {', '.join(names)}")
        for key in values
        if key not in names
    ]
    if not isinstance(values.get("calibrated", False), bool):
        problems.add("hardware.value", f"{where}: calibrated={values['calibrated']!r}: legal are true and false")
    remarks = values.get("remarks", ())
    if not isinstance(remarks, list | tuple) or not all(isinstance(item, str) for item in remarks):
        problems.add("hardware.value", f"{where}: remarks={remarks!r}: must be a list of sentences")
    for key in (key for key in names if key not in ("name", "calibrated", "torch_name", "remarks")):
        value = values.get(key, 1)
        least = 0 if key in ("reserved_gib", "link_us", "nic_us", "launch_us", "overlap", "beyond") else 1e-9
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e9:
            problems.add(
                "hardware.value",
                f"{where}: {key}={value!r}: must be a number {'from 0 on' if least == 0 else 'above 0'}, such as 5.0e+1",
            )
    if not isinstance(values.get("gpus_per_node", 1), int):
        problems.add("hardware.value", f"{where}: gpus_per_node={values['gpus_per_node']!r}: must be a whole number")
    if not problems:
        problems += [
            Refusal("hardware.value", f"{where}: {key}={values[key]}: is a share; legal are 0 to 1")
            for key in ("achievable", "attention", "overlap")
            if values[key] > 1
        ]
        reserved, memory = values["reserved_gib"], values["memory_gib"]
        if reserved >= memory:
            problems.add(
                "hardware.value", f"{where}: reserved_gib={reserved} leaves nothing of memory_gib={memory}; legal is less"
            )
    if problems:
        raise ConfigError(problems)
    texts = {"name": str(values["name"]), "torch_name": str(values.get("torch_name", "")), "remarks": tuple(remarks)}
    return Hardware(**{**values, **texts})


def _near(name: str) -> str:
    """What an unknown name may have been meant to be, as a part of a message: a device, or a file that is there."""
    plain = {re.sub("[^a-z0-9]", "", known): known for known in known_hardware()}
    asked = re.sub("[^a-z0-9]", "", name.lower().removesuffix(".yaml"))
    within = [known for short, known in plain.items() if asked and (asked in short or short in asked)]
    near = within or [plain[short] for short in difflib.get_close_matches(asked, plain, cutoff=0.5)]
    near = [plain[asked]] if asked in plain else near
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else nearby(Path(name).expanduser())
