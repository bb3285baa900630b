"""The model card of an exported policy version: its lineage, in figures of the store."""

from __future__ import annotations

from roundhouse import __version__
from roundhouse.sql.lineage import segments_of
from roundhouse.stages.evaluate import set_of
from roundhouse.stages.report import environment_name, iteration_manifests
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, StageKind, read_manifest


def model_card(run: Run, store: str, checkpoint: Reference, dtype: str | None, *, is_adapter: bool) -> str:
    """Return the text of README.md of an exported version."""
    version, origin = checkpoint.policy_version, run.config.policy.origin
    manifest = read_manifest(checkpoint)
    library = "peft" if is_adapter else "transformers"
    lineage = [
        ("run", f"`{run.run_id}` (uid `{run.uid}`)"),
        ("policy version", str(version)),
        ("checkpoint", f"`{checkpoint.uri}`, manifest sha256 `{checkpoint.digest}`"),
        (
            "weights",
            f"`{manifest.model_files.weights_digest or manifest.details.get('weights_digest') or 'not on record'}`",
        ),
        ("starting policy", f"`{origin}`" if origin else "made by the run (`policy.kind: warm_start`)"),
        ("trained in", _segments(run, store, version)),
        ("environment", f"`{environment_name(run.config.environment)}`"),
        ("algorithm", f"`{run.config.train.algorithm.kind}`"),
        ("seed", str(run.config.seed)),
        ("configuration", f"digest `{manifest.provenance.config_digest}`"),
        ("code", f"Roundhouse {__version__}, `{manifest.provenance.code_version}`"),
        ("number format", dtype or "as trained"),
    ]
    rows = "\n".join(f"| {name} | {value} |" for name, value in lineage)
    head = f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [roundhouse, reinforcement-learning]\n---\n"
    kind = "; an adapter (LoRA)" if is_adapter else ""
    return (
        f"{head}\n# {run.run_id}, version {version}\n\nTrained with Roundhouse by reinforcement learning{kind}.\n\n"
        f"## Lineage\n\n| | |\n| --- | --- |\n{rows}\n{_evaluations(run, version)}"
    )


def _segments(run: Run, store: str, version: int) -> str:
    """Return the iterations that made a version, including those of its ancestors."""
    parts = [
        f"iterations {segment.first} to {segment.last} of run `{segment.run_id}`{f' ({segment.note})' if segment.note else ''}"
        for segment in reversed(segments_of(store, run.run_id, version))
        if segment.first <= segment.last
    ]
    return ", ".join(parts) or "no iteration: it is the starting policy"


def _evaluations(run: Run, version: int) -> str:
    """Return the held-out rewards of a version as a table; nothing if it was not evaluated."""
    rows = []
    for kind, manifest in iteration_manifests(run, version).items():
        if kind != StageKind.EVALUATE and set_of(kind) is None:
            continue
        for name, mean in manifest.metrics.items():
            if name.endswith("reward/mean"):
                error = manifest.metrics.get(f"{name.removesuffix('mean')}stderr")
                rows.append(f"| `{name}` | {mean:.4f} | {'–' if error is None else f'{error:.4f}'} |")
    if not rows:
        return ""
    lines = "\n".join(rows)
    return f"\n## Held-out reward\n\n| metric | mean | standard error |\n| --- | --- | --- |\n{lines}\n"
