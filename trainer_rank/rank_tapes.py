"""A rank's tapes as files, one for each kind of pass, so that the next process decides without probing.

Every file is a tape of its own: what it was recorded on, how long its passes took, and what libraries took outside
PyTorch's allocator in each phase. A file that was recorded on anything else is refused with the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer_rank.admission.budget import Term
from trainer_rank.admission.ladder import Retention
from trainer_rank.allocator.settings import VARIABLES
from trainer_rank.errors import TapeError
from trainer_rank.forecasting import PassKey, Recorded
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.tapes.storage import load_tape, save_tape
from trainer_rank.tapes.tape import Kind, Tape

_ENDINGS = (".tape.json", ".tape.json.gz")


@dataclass(frozen=True)
class RankTapes:
    """What a rank knows from recordings: its kinds of pass, and the libraries' claims by phase."""

    recorded: Mapping[PassKey, Recorded]
    claims: tuple[Term, ...] = ()


def load_rank_tapes(path: str | Path, model: ModelRuntime) -> RankTapes:
    """Read a tape file that a rank saved, or all of a folder; of claims made twice the larger one counts.

    Raises TapeError naming what differs when a tape was recorded on another card, model, topology or software.
    """
    target, recorded, claims = provenance(model), dict[PassKey, Recorded](), dict[str, Term]()
    for file in _files(Path(path)):
        tape = load_tape(file, target=target)
        if tape.kind is None:
            raise TapeError(f"{file}: names no kind of pass; give tapes that TrainerRank.save_tapes wrote")
        key = _key(tape.kind)
        if key in recorded:
            raise TapeError(f"{file}: another tape of {path} is of the same kind of pass, {key}; remove one")
        recorded[key] = _recorded(tape, tape.kind)
        for claim in tape.claims:
            known = claims.get(claim.name)
            if known is None or (known.size or 0) < (claim.size or 0):
                claims[claim.name] = replace(claim, source=f"tape {file.name}: {claim.source}")
    return RankTapes(recorded, tuple(claims.values()))


def save_rank_tapes(path: str | Path, model: ModelRuntime, tapes: RankTapes) -> tuple[Path, ...]:
    """Write one tape for each kind of pass into the folder ``path``, each with the claims; returns the files."""
    if not tapes.recorded:
        raise TapeError(f"{path}: nothing was recorded yet; run a batch under a policy that forecasts, then save")
    folder, target, written = Path(path), provenance(model), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TapeError(f"{path}: is no folder and cannot be made one ({error.strerror})") from error
    for key, recorded in sorted(tapes.recorded.items()):
        file = folder / f"{_name(key)}{_ENDINGS[1]}"
        kind = Kind(
            key.adapter_bytes,
            key.gradients,
            key.hidden,
            key.retention.value,
            recorded.fixed_ns,
            recorded.token_ns,
            recorded.host_per_token,
            recorded.first_pass_bytes,
            key.shared,
        )
        save_tape(replace(recorded.tape, provenance=target, claims=tapes.claims, kind=kind), file)
        written.append(file)
    return tuple(written)


def provenance(model: ModelRuntime) -> dict[str, str]:
    """Return what decides which passes a model records on its device: equal facts, equal tapes."""
    device, slots = model.device, model.slots
    precisions = {str(each.dtype) for slot in slots for each in model.adapter_parameters(slot).values()}
    return {
        "allocator": ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "default",
        "card": device.card.name,
        "device": device.torch_device.type,
        "geometry": _told(asdict(model.geometry)),
        "topology": model.topology.label,
        "adapters": ", ".join(sorted(precisions)) or "none",
        "kernels": _told({**model.kernel_settings, **_torch_settings()}),
        "stack": f"torch {torch.__version__}",
    }


def _torch_settings() -> dict[str, object]:
    """Settings of PyTorch under which it takes other kernels or other workspaces."""
    attention: Any = torch.backends.cuda  # its switches are untyped
    return {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "flash_attention": attention.flash_sdp_enabled(),
        "efficient_attention": attention.mem_efficient_sdp_enabled(),
        "cudnn_attention": attention.cudnn_sdp_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default"),
    }


def _told(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.name.endswith(_ENDINGS) and not each.name.startswith("."))
    if not found:
        raise TapeError(f"{path}: holds no tape; record one, then TrainerRank.save_tapes")
    return found


def _name(key: PassKey) -> str:
    outputs = ["hidden"] * key.hidden + ["shared"] * key.shared
    return "-".join(["train" if key.gradients else "infer", key.retention.value, *outputs, str(key.adapter_bytes)])


def _key(kind: Kind) -> PassKey:
    if kind.retention not in [each.value for each in Retention]:
        raise TapeError(f"a tape keeps graphs on {kind.retention!r}; choose of {', '.join(Retention)}")
    return PassKey(kind.adapter_bytes, kind.gradients, kind.hidden, Retention(kind.retention), kind.shared)


def _recorded(tape: Tape, kind: Kind) -> Recorded:
    return Recorded(tape, kind.fixed_ns, kind.token_ns, kind.host_per_token, kind.first_pass_bytes)
