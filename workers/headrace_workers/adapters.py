"""`Adapters`: the LoRA adapters that this worker serves, by the names under which messages ask for them.

A message can name an adapter and nothing else: which folder that is, only the operator says.
"""

from collections.abc import Mapping
from pathlib import Path

from headrace_broker.messages import lora_problems
from headrace_engine.checkpoint import adapter_fingerprint
from headrace_engine.lora_request import LoRARequest, id_of
from headrace_workers.errors import WorkerSettingsError

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Adapters:
    """Adapters named one by one, and all those that lie in one folder.

    An adapter whose files were replaced is another one from the next request on; those that run keep what they began
    with. One that is put into the folder, or taken out, comes and goes without a restart.

    Raises:
        WorkerSettingsError: a name cannot be asked for, or a folder does not exist.
    """

    def __init__(self, modules: Mapping[str, str], folder: str | None = None) -> None:
        self._modules = {name: Path(path) for name, path in modules.items()}
        self._fingerprints: dict[int, str] = {}
        self._folder = Path(folder) if folder is not None else None
        problems = [f"HEADRACE_LORA_MODULES: {problem}" for name in modules for problem in lora_problems(name)]
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
        """Those that the operator named; what lies in the folder is not among them."""
        return tuple(self._modules)

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of that name, None where there is none."""
        folder = self._modules.get(name)
        if folder is None and self._folder is not None and not lora_problems(name):
            folder = self._folder / name
        if folder is None or not (folder / _FILES[0]).is_file():
            return None
        found = LoRARequest(name, id_of(name, *map(_version, (folder / file for file in _FILES))), str(folder))
        if found.lora_int_id not in self._fingerprints:
            self._fingerprints[found.lora_int_id] = adapter_fingerprint(found.lora_path)
        return found

    def fingerprint(self, lora: LoRARequest) -> str:
        """Of the weights of an adapter that `find` has found; read once for each version of its files."""
        return self._fingerprints.get(lora.lora_int_id, "")

    def named(self) -> list[LoRARequest]:
        """Those that the operator named, for loading them at the start."""
        return [self.find(name) or LoRARequest(name, lora_path=str(path)) for name, path in self._modules.items()]


def _version(file: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
