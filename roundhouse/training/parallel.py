"""The processes that train one model together, and their sums.

Invariant: every rank calls the same verbs with the same request and gets the same answer: each computes its share of
the sequences, and the answer has the sums over all ranks. One process alone is rank 0 of 1, for which every function
here returns its argument.

`torchrun` starts the processes and numbers them by environment variables; `join` makes them a group, over NCCL on GPUs
and gloo on CPUs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from roundhouse.errors import ConfigError, InfraError
from roundhouse.http.asgi import is_loopback
from roundhouse.training.context_parallel import Context
from roundhouse.training.loss import Share
from roundhouse.training.metrics import METRICS, Denominator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=10)
"""For one collective: a rank that died is noticed after this, and its peers stop with an error instead of waiting."""

T = TypeVar("T")
_EXTREMES = (Denominator.MAX, Denominator.MIN)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among `size` processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among those of this machine: which of its GPUs to use."""
    here: int = 1
    """Ranks of this machine, which share its cores."""
    context: Context | None = None
    """The ranks that have other positions of this rank's microbatches."""
    mesh: DeviceMesh | None = None
    """[replicate, fsdp] with several replicas, [fsdp, tp] with tensor parallelism; None: every rank has other rows of
    the one model. Ranks of a replica are neighbours; so are ranks that split a matrix."""
    experts: DeviceMesh | None = None
    """[efsdp, ep], all ranks: neighbours along `ep` have different experts of a layer, those along `efsdp` other rows of the
    same; None: experts are sharded as all else."""

    @property
    def leads(self) -> bool:
        """Return whether this is the process that writes files."""
        return self.rank == 0

    @property
    def first_here(self) -> int:
        """Return the first rank of this machine, which fetches files for its neighbours."""
        return self.rank - self.local_rank

    @property
    def is_beside_leader(self) -> bool:
        """Return whether it can read the files of the leading rank's machine."""
        return self.rank < self.here

    @property
    def sharing(self) -> int:
        """Ranks that compute each microbatch together, and find the same of it."""
        return (1 if self.context is None else self.context.size) * self.columns

    @property
    def columns(self) -> int:
        """Ranks that share each matrix by tensor parallelism."""
        return self._along("tp")

    @property
    def replicas(self) -> int:
        """Groups of ranks that hold the whole model each."""
        return self._along("replicate")

    @property
    def shards(self) -> int:
        """Ranks over which the rows of a parameter are spread."""
        return self.size // (self.replicas * self.columns)

    @property
    def expert_groups(self) -> int:
        """Groups of ranks that have different experts of a layer."""
        return 1 if self.experts is None else self.experts["ep"].size()

    def _along(self, dimension: str) -> int:
        present = self.mesh is not None and dimension in (self.mesh.mesh_dim_names or ())
        return self.mesh[dimension].size() if self.mesh is not None and present else 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over all ranks, element by element; of ranks that share their microbatches one counts."""
        return self.total(values if self.rank % self.sharing == 0 else np.zeros_like(values))

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum over all ranks, each of which counts."""
        return self._reduced(values, "SUM")

    def largest(self, values: np.ndarray) -> np.ndarray:
        """The maximum over all ranks, element by element."""
        return self._reduced(values, "MAX")

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.sum(np.zeros(1))

    def gather(self, found: T) -> list[T]:
        """Gather each rank's value, in rank order."""
        if self.size == 1:
            return [found]
        import torch.distributed as distributed

        every: list[Any] = [None] * self.size
        try:
            distributed.all_gather_object(every, found)
        except RuntimeError as error:
            raise InfraError(
                f"Rank {self.rank} of {self.size} lost its peers: {error}. Start the job again."
            ) from error
        return every

    def merge(self, shares: dict[str, Share]) -> dict[str, Share]:
        """Merge all ranks' metrics; a rank without work adds nothing."""
        if self.size == 1:
            return shares
        names = list(METRICS)
        present = np.array([name in shares for name in names], dtype=np.float64)
        counts = np.array([shares[name].count if name in shares else 0 for name in names], dtype=np.float64)
        values = np.array([shares[name].value if name in shares else 0.0 for name in names], dtype=np.float64)
        kinds = [METRICS[name].denominator for name in names]
        sign = np.where([kind is Denominator.MIN for kind in kinds], -1.0, 1.0)
        extremes = sign * self.largest(np.where(present > 0, sign * values, -np.inf))
        present, counts, sums = self.sum(np.stack([present, counts, values]))
        return {
            name: Share(float(extremes[i] if kinds[i] in _EXTREMES else sums[i]), int(counts[i]))
            for i, name in enumerate(names)
            if present[i]
        }

    def _reduced(self, values: np.ndarray, operation: str) -> np.ndarray:
        if self.size == 1:
            return values
        import torch.distributed as distributed

        device = torch.device("cuda", self.local_rank) if distributed.get_backend() == "nccl" else torch.device("cpu")
        tensor = torch.from_numpy(np.array(values)).to(device)
        try:
            distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation))
        except RuntimeError as error:
            raise InfraError(
                f"Rank {self.rank} of {self.size} lost its peers: {error}. Start the job again."
            ) from error
        return tensor.cpu().numpy()


def join(
    device: str,
    timeout: timedelta = TIMEOUT,
    *,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    data_parallel_replicate: int = 1,
    expert_parallel: int = 1,
) -> Ranks:
    """This process's place, from what `torchrun` put into the environment; alone when it put nothing there.

    Args:
        device: `cuda` or `cpu`, the kind that the model trains on.
        context_parallel: ranks that share each microbatch by its positions.
        tensor_parallel: neighbouring ranks that share each matrix.
        data_parallel_replicate: groups of neighbouring ranks that hold the whole model each.
        expert_parallel: neighbouring ranks that have different experts of a layer.

    Raises:
        ConfigError: the machine has fewer GPUs than processes, or the ranks cannot be grouped so.
        InfraError: the other ranks did not come within the time.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    refuse_uneven(size, context_parallel, tensor_parallel, data_parallel_replicate, expert_parallel)
    if size == 1:
        return Ranks()
    import torch.distributed as distributed

    ranks = Ranks(
        int(os.environ["RANK"]),
        size,
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if device == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"Rank {ranks.rank} is process {ranks.local_rank} of its machine, which has {torch.cuda.device_count()} GPUs. "
                "Start torchrun with --nproc-per-node no larger than that."
            )
        torch.cuda.set_device(ranks.local_rank)
    if not distributed.is_initialized():
        _meet(ranks, "nccl" if device == "cuda" else "gloo", timeout)
    if tensor_parallel > 1 or data_parallel_replicate > 1:
        sharding = size // (tensor_parallel * data_parallel_replicate)
        sizes = {"replicate": data_parallel_replicate, "fsdp": sharding, "tp": tensor_parallel}
        sizes = {name: count for name, count in sizes.items() if count > 1 or name == "fsdp"}
        ranks = replace(ranks, mesh=_mesh(device, sizes))
    if expert_parallel > 1:
        ranks = replace(ranks, experts=_mesh(device, {"efsdp": size // expert_parallel, "ep": expert_parallel}))
    if context_parallel > 1:
        by_group = np.arange(size).reshape(-1, context_parallel, tensor_parallel).swapaxes(1, 2)
        groups = by_group.reshape(-1, context_parallel).tolist()
        group, _ = distributed.new_subgroups_by_enumeration(groups, timeout=timeout)
        ranks = replace(ranks, context=Context.of(ranks.rank // tensor_parallel % context_parallel, group))
    return ranks


def refuse_uneven(ranks: int, context: int, tensor: int, replicas: int, experts: int) -> None:
    """Raises ConfigError: the sizes of `train.service` do not divide so many ranks."""
    if ranks % (context * tensor * replicas):
        raise ConfigError(
            f"train.service.context_parallel is {context}, tensor_parallel {tensor} and data_parallel_replicate {replicas}, "
            f"and their product does not divide {ranks} ranks. Set train.service.processes to a multiple of the product."
        )
    if ranks % experts:
        raise ConfigError(
            f"train.service.expert_parallel is {experts}, which does not divide {ranks} ranks. Set train.service.processes "
            f"to a multiple of it."
        )


def _mesh(device: str, sizes: dict[str, int]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _meet(ranks: Ranks, backend: str, timeout: timedelta) -> None:
    """Form the group of all processes; InfraError if some are missing at the time limit."""
    import torch.distributed as distributed

    try:
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        if not is_loopback(address) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            distributed.init_process_group(backend, timeout=timeout)  # with torch's own store of keys, or torchrun's
        else:  # all ranks are on this machine: gloo would listen at the address of its name, torch's own store everywhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
            listening = None if ranks.rank else socket.create_server((address, port)).detach()
            store = distributed.TCPStore(
                address, port, ranks.size, is_master=ranks.leads, timeout=timeout, master_listen_fd=listening
            )
            distributed.init_process_group(
                backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise InfraError(f"Rank {ranks.rank} of {ranks.size} did not find its peers: {error}") from error


def leave() -> None:
    """End the group of processes, if one exists."""
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole, on every rank; collective if it is sharded."""
    whole = getattr(tensor, "full_tensor", None)  # DTensor's import takes a second, which one process need not pay
    return tensor if whole is None else whole()


PIECE_BYTES = 16 * 2**20
"""Size of a tensor's pieces on their way from their owner: large enough for the network, small relative to a rank's
part of a model."""


def row_pieces(tensor: torch.Tensor, ranks: Ranks, owner: int) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor in order, in pieces, on one rank; the others only send. Collective if the tensor is
    spread over ranks: each of them exhausts the iterator.

    If it is spread by rows, the ranks of the owner's replica send pieces of at most PIECE_BYTES, or of one row, and no
    rank holds more than its own rows and a piece. A matrix that tensor parallelism also splits is whole on every rank
    for a moment; it is one piece, as is a tensor that is not spread.

    Raises:
        InfraError: a rank is lost.
    """
    owns, mine = ranks.rank == owner, tensor.detach()
    if not hasattr(mine, "to_local"):  # a DTensor: its import takes a second that one process need not pay
        if owns:
            yield mine
        return
    if (holders := _row_holders(mine)) is None:
        whole = full(mine)
        if owns:
            yield whole
        return
    if owner not in (holder for holder, _, _ in holders):
        return
    local = mine.to_local()
    step = max(1, PIECE_BYTES // (max(1, tensor.shape[1:].numel()) * tensor.element_size()))
    for holder, first, last in holders:
        if not owns and holder != ranks.rank:
            continue
        for begin in range(0, last - first, step):
            end = min(begin + step, last - first)
            piece = local[begin:end] if holder == ranks.rank else local.new_empty(end - begin, *tensor.shape[1:])
            _passed_on(piece.contiguous(), ranks, holder, owner)
            if owns:
                yield piece


def gathered(tensor: torch.Tensor, ranks: Ranks, owner: int) -> torch.Tensor | None:
    """Return a tensor whole on one rank, None on the others; collective if it is spread over them.

    Raises:
        InfraError: a rank is lost.
    """
    whole, begin = None, 0
    for piece in row_pieces(tensor, ranks, owner):
        if piece.shape == tensor.shape:
            return piece
        whole = piece.new_empty(tensor.shape) if whole is None else whole
        whole[begin : begin + len(piece)] = piece
        begin += len(piece)
    return whole


def _passed_on(tensor: torch.Tensor, ranks: Ranks, holder: int, owner: int) -> None:
    """Fill the owner's tensor with the holder's."""
    import torch.distributed as distributed

    if holder == owner:
        return
    try:
        distributed.send(tensor, owner) if ranks.rank == holder else distributed.recv(tensor, holder)
    except RuntimeError as error:
        raise InfraError(f"Rank {ranks.rank} of {ranks.size} lost its peers: {error}. Start the job again.") from error


def sent_row(
    tensor: torch.Tensor, row: int, ranks: Ranks, owner: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """A row of a tensor that may be spread over the ranks by rows, changed by the rank of the owner's replica that holds it, on
    one rank.

    Args:
        change: given the row, [1, …].

    Raises:
        InfraError: a rank is lost.
    """
    mine: Any = tensor.detach()
    if not hasattr(mine, "to_local"):
        return change(mine[row : row + 1]) if ranks.rank == owner else None
    holders = _row_holders(mine) or []
    holder, begin = next((rank, begin) for rank, begin, end in holders if begin <= row < end)
    if owner not in (rank for rank, _, _ in holders) or ranks.rank not in (holder, owner):
        return None
    index = row - begin
    is_holder = ranks.rank == holder
    local = mine.to_local()
    one = change(local[index : index + 1] if is_holder else local.new_empty(1, *local.shape[1:])).contiguous()
    _passed_on(one, ranks, holder, owner)
    return one if ranks.rank == owner else None


def sharded_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of `whole`, laid out over the ranks as the parameter is; of a tensor of a mapped file, a rank reads its rows."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return whole.to(parameter.device, copy=True)
    from torch.distributed.tensor import DTensor

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    if (holders := _row_holders(parameter)) is None:
        from transformers.distributed.sharding_utils import DtensorShardOperation

        local: Any = DtensorShardOperation(parameter).shard_tensor(whole, device=mesh.device_type)  # type: ignore[arg-type]
        local = local.contiguous() if local.data_ptr() != whole.data_ptr() else local.clone()
    else:
        import torch.distributed as distributed

        begin, end = next((begin, end) for rank, begin, end in holders if rank == distributed.get_rank())
        local = whole[begin:end].to(mesh.device_type, copy=True)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _row_holders(tensor: Any) -> list[tuple[int, int, int]] | None:
    """Return the ranks of this replica over which a tensor is spread by rows, with their first row and end, in row
    order; None if tensor parallelism splits it, too."""
    mesh: DeviceMesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return None
    if "ep" in names:  # a group's experts are neighbours in the tensor
        groups = mesh.mesh.T.tolist()
    else:
        import torch.distributed as distributed

        over = mesh["fsdp"] if "replicate" in names else mesh
        groups = [distributed.get_process_group_ranks(over.get_group())]
    count = len(tensor) // len(groups)
    rows = -(-count // len(groups[0]))
    return [
        (rank, number * count + min(place * rows, count), number * count + min((place + 1) * rows, count))
        for number, group in enumerate(groups)
        for place, rank in enumerate(group)
    ]


def shard(root: torch.nn.Module, layers: Iterable[torch.nn.Module], ranks: Ranks, device: str, dtype: str) -> None:
    """Spread parameters, and later gradients and optimizer state, over the ranks of a replica with FSDP2; do nothing on
    one rank.

    A layer's parameters are whole only while it computes; all others of `root` form one group. Gradients are summed
    over the ranks, not averaged, because each rank's contribution is already scaled by counts of the whole update.
    Experts that ranks have already split are spread over the ranks with the same ones; their gradients are sums over
    tokens of all ranks. Under bfloat16 parameters are gathered and used in it, and gradients are reduced in float32.
    """
    if ranks.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if ranks.mesh is None:
        mesh = init_device_mesh(device, (ranks.size,))
    else:
        mesh = ranks.mesh if ranks.replicas > 1 else ranks.mesh["fsdp"]
    reduced = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = reduced if dtype == "bfloat16" else MixedPrecisionPolicy()
    if ranks.experts is not None:
        for module in [*root.modules()]:
            if any(hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False)):
                fully_shard(module, mesh=ranks.experts["efsdp"], mp_policy=policy)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # after a pass without gradient the root too has to be gathered anew, because an update may come before the next
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other


def reduce_gradients(root: torch.nn.Module, *, shards: bool, replicas: bool) -> None:
    """Set the ranks over which a sharded module's next backward pass sums gradients, including those of earlier passes.

    Args:
        shards: over the ranks of a replica, after which each keeps its part.
        replicas: over these, too; needs `shards`.
    """
    module: Any = root
    module.set_requires_gradient_sync(shards)
    module.set_requires_all_reduce(replicas)


def clip_gradient(root: torch.nn.Module, limit: float, ranks: Ranks) -> float:
    """Scale the gradient down to this norm if it is larger, and return its norm before, over all ranks."""
    parameters = [parameter for parameter in root.parameters() if parameter.grad is not None]
    if ranks.columns == 1 and ranks.experts is None:
        return float(full(torch.nn.utils.clip_grad_norm_(parameters, limit)))
    parts: list[tuple[torch.Tensor, int]] = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        split = gradient.device_mesh.ndim > 1 and not gradient.placements[1].is_replicate()
        parts.append((gradient.to_local(), 1 if split else ranks.columns))  # and how many ranks have the same
    squares = torch.stack([torch.linalg.vector_norm(part).square() / copies for part, copies in parts])
    norm = float(ranks.total(squares.double().sum(0, keepdim=True).cpu().numpy())[0]) ** 0.5
    for part, _ in parts:
        part.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm
