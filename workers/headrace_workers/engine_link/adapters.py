"""`Adapters`: the LoRA adapters that this worker serves, by the names that messages use.

A message can only name an adapter. The operator configures the folder for each name.
"""

from collections.abc import Mapping
from pathlib import Path

from headrace_engine.checkpoints.checkpoint import adapter_fingerprint
from headrace_engine.requests.lora_request import LoRARequest, id_of
from headrace_wire.request import LORA
from headrace_workers.errors import WorkerSettingsError

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Adapters:
    """Find adapters by name: those of `modules`, and those in the subfolders of `folder`.

    If the files of an adapter are replaced, new requests use the new weights, and running requests keep the old ones.
    Adapters can be added to the folder, or removed from it, without a restart.

    Raises:
        WorkerSettingsError: a name is invalid, or a folder does not exist.
    """

    def __init__(self, modules: Mapping[str, str], folder: str | None = None) -> None:
        self._modules = {name: Path(path) for name, path in modules.items()}
        self._fingerprints: dict[int, str] = {}
        self._folder = Path(folder) if folder is not None else None
        problems = [f"HEADRACE_LORA_MODULES: {problem}" for name in modules if (problem := LORA.problem("lora", name))]
        problems += [
            f"HEADRACE_LORA_MODULES: the folder of {name!r}, {path}, does not exist"
            for name, path in self._modules.items()
            if not path.is_dir()
        ]
        if self._folder is not None and not self._folder.is_dir():
            problems.append(f"HEADRACE_LORA_DIR: the folder {self._folder} does not exist")
        if problems:
            raise WorkerSettingsError("; ".join(problems))

    @property
    def enabled(self) -> bool:
        return bool(self._modules) or self._folder is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `modules`, without the adapters in the folder."""
        return tuple(self._modules)

    def find(self, name: str) -> LoRARequest | None:
        """Return the adapter of this name, or None if there is none."""
        folder = self._modules.get(name)
        if folder is None and self._folder is not None and LORA.problem("lora", name) is None:
            folder = self._folder / name
        if folder is None or not (folder / _FILES[0]).is_file():
            return None
        found = LoRARequest(name, id_of(name, *map(_version, (folder / file for file in _FILES))), str(folder))
        if found.lora_int_id not in self._fingerprints:
            self._fingerprints[found.lora_int_id] = adapter_fingerprint(found.lora_path)
        return found

    def fingerprint(self, lora: LoRARequest) -> str:
        """Return the fingerprint of the weights of an adapter that `find` returned; computed once per file version."""
        return self._fingerprints.get(lora.lora_int_id, "")

    def named(self) -> list[LoRARequest]:
        """Return the adapters in `modules`, to load them at the start."""
        return [self.find(name) or LoRARequest(name, lora_path=str(path)) for name, path in self._modules.items()]


def _version(file: Path) -> tuple[int, int] | None:
    """Return the time and size of a file, which change when it is rewritten, or None if it cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
