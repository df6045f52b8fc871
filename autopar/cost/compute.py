"""How long an operator takes on one rank: a roofline under the profile's efficiency curves, plus launch cost.

time = launch_ns · kernels + max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency))

Where the profile has tables (`kernels`):
time = call_ns · gradients + max(Σ FLOPs · rate(shape), bytes / bandwidth) + copies + sums
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from autopar.cost.kernels import Found, Kernels, backward_kernels, forward_kernels, found_in
from autopar.cost.profile import OperatorCurve, Profile
from autopar.cost.seen import Ratios, in_order, log_factor
from autopar.ir.graph import DTYPE_BYTES, Node, Tensor
from autopar.ir.placement import Shape
from autopar.ops.table import operator
from autopar.ops.work import EINSUM, VIEW, Work, WorkKey


def node_time_ns(
    node: Node,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    tensors: Mapping[str, Tensor],
    profile: Profile,
) -> tuple[int, int]:
    """Nanoseconds (forward, backward) of one operator on one rank.

    `operand_shapes` are the local shapes in the order of `node.operands`, `result_shapes` of `node.results`.
    The backward direction counts the gradients of differentiable operands only. Memoised.
    """
    return call_time_ns(node_call(node, operand_shapes, result_shapes, tensors), profile)


def node_issue_ns(
    node: Node,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    tensors: Mapping[str, Tensor],
    profile: Profile,
) -> tuple[int, int]:
    """Nanoseconds (forward, backward) that the host needs to launch an operator: what `Profile.host` says."""
    return call_issue_ns(node_call(node, operand_shapes, result_shapes, tensors), profile) if profile.host else (0, 0)


def split_backward_ns(
    node: Node,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    tensors: Mapping[str, Tensor],
    leads_back: tuple[bool, ...],
    profile: Profile,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Nanoseconds of an operator's backward direction in two parts, and what the host needs to launch each.

    First the gradients of the operands that `leads_back` marks, then those of the others: each as if it were alone, so
    that what both need is done twice. An operator with both is a branch, which costs what the profile's runtime says.
    """
    call = node_call(node, operand_shapes, result_shapes, tensors)
    led = tuple(wanted and back for wanted, back in zip(call.differentiable, leads_back, strict=True))
    kept = tuple(wanted and not back for wanted, back in zip(call.differentiable, leads_back, strict=True))
    parts = call._replace(differentiable=led), call._replace(differentiable=kept)
    times, issues = ([f(part, profile)[1] for part in parts] for f in (call_time_ns, call_issue_ns))
    branch = profile.runtime.branch_ns if profile.runtime and any(led) and any(kept) else (0, 0)
    return (times[0] + branch[0], times[1] + branch[1]), (issues[0], issues[1])


def gathered_ns(
    node: Node,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    tensors: Mapping[str, Tensor],
    times: int,
    profile: Profile,
) -> tuple[int, int]:
    """Nanoseconds (forward, backward) that an operator takes longer where each rank makes the gradients of what is
    stored of the rows of so many ranks: those products, a function of the runtime's, and the copy that is sent."""
    own = node_call(node, operand_shapes, result_shapes, tensors)
    own = own._replace(differentiable=(False, *own.differentiable[1:]))
    rows, *others = operand_shapes
    every = own._replace(
        operand_shapes=((times * rows[0], *rows[1:]), *others),
        result_shapes=tuple((times * shape[0], *shape[1:]) for shape in result_shapes),
    )
    forward, backward = profile.runtime.function_ns if profile.runtime else (0, 0)
    copied = copy_time_ns(own.operand_bytes[0] + own.result_bytes, profile)
    longer = max(0, call_time_ns(every, profile)[1] - call_time_ns(own, profile)[1])
    return forward, backward + copied + longer


def flops(node: Node, operand_shapes: tuple[Shape, ...], result_shapes: tuple[Shape, ...]) -> int:
    """Forward floating-point operations of one operator on local shapes."""
    sizes = tuple(4 for _ in operand_shapes), tuple(4 for _ in result_shapes)
    wanted = tuple(True for _ in operand_shapes)
    call = WorkKey(node.op, operand_shapes, result_shapes, *sizes, wanted, "float32", _detail(node))
    return operator(node.op).work.forward_flops(call)


def forward_work(
    node: Node, operand_shapes: tuple[Shape, ...], result_shapes: tuple[Shape, ...], tensors: Mapping[str, Tensor]
) -> Work:
    """What one operator computes and moves in its forward pass, on local shapes."""
    call = node_call(node, operand_shapes, result_shapes, tensors)
    return operator(node.op).work.forward(call)


def optimizer_time_ns(num_bytes: int, num_tensors: int, num_kernels: int, sharded: bool, profile: Profile) -> int:
    """Nanoseconds to read and write `num_bytes` of parameters, gradients and optimizer state.

    Each of the tensors costs what the profile measured a call to cost (`sharded`: they are DTensors), or launches.
    Whole updates take as much longer as runs have shown.
    """
    runtime = profile.runtime
    calls = num_tensors * runtime.optimizer_ns[sharded] if runtime else num_kernels * profile.facts.launch_ns[0]
    priced = _memory_ns(num_bytes, "optimizer", 0, profile) + calls
    if not (profile.seen.updates and num_tensors and priced):
        return priced
    return round(priced * math.exp(log_factor(_update_ratios(profile), math.log(priced))))


def _update_ratios(profile: Profile) -> Ratios:
    if "updates" not in profile.seen_ratios:
        own = [item for item in profile.seen.updates if item.ranks_sharing == profile.ranks_sharing and item.priced_ns]
        profile.seen_ratios["updates"] = in_order(
            (math.log(item.priced_ns), math.log(max(item.duration_ns, 1) / item.priced_ns)) for item in own
        )
    return profile.seen_ratios["updates"]


def pointwise_time_ns(num_bytes: int, profile: Profile) -> int:
    """Nanoseconds of one pointwise kernel that moves `num_bytes`, such as adding up two gradients."""
    curve = profile.curve("pointwise")
    return _memory_ns(num_bytes, "pointwise", 0, profile) + _call_ns(curve, 0, profile) if num_bytes else 0


def split_norm_time_ns(passes: tuple[int, int], num_bytes: int, profile: Profile) -> tuple[int, int]:
    """Nanoseconds (forward, backward) of a norm whose statistics cross ranks: plain operators, pass by pass.

    passes: how often forward and backward each read and write as much as the activation's `num_bytes`.
    """
    forward, backward = (count * pointwise_time_ns(2 * num_bytes, profile) for count in passes)
    return forward, backward


def split_norm_backward_ns(passes: tuple[int, int], num_bytes: int, profile: Profile) -> tuple[int, int]:
    """Nanoseconds of its gradient to the activation, and of that to the weight: a product and its sum."""
    a_pass = pointwise_time_ns(2 * num_bytes, profile)
    return (passes[1] - 2) * a_pass, 2 * a_pass


def in_bits_ns(moved: tuple[Sequence[int], Sequence[int]], profile: Profile) -> tuple[tuple[int, int], tuple[int, int]]:
    """Nanoseconds (forward, backward) of an operator's further kernels that pack and unpack what it keeps, and of the
    host to launch them. moved: bytes that each reads and writes."""
    runtime, host = profile.runtime, profile.host
    forward, backward = (
        sum(pointwise_time_ns(size, profile) for size in sizes) + (runtime.function_ns[side] if runtime else 0)
        for side, sizes in enumerate(moved)
    )
    issued = [len(sizes) * host.operator_ns if host else 0 for sizes in moved]
    return (forward, backward), (issued[0], issued[1])


def gradient_time_ns(num_bytes: int, profile: Profile) -> int:
    """Nanoseconds in which a rank's runtime takes a parameter's gradient that goes home: hook, copy, DTensor.
    As runs have shown; 0 where the profile says nothing of the runtime."""
    return round(priced_gradient_ns(num_bytes, profile) * profile.seen.of_gradients(profile.ranks_sharing))


def priced_gradient_ns(num_bytes: int, profile: Profile) -> int:
    """The same, whatever runs have shown."""
    return profile.runtime.parameter_ns + copy_time_ns(num_bytes, profile) if profile.runtime else 0


def copy_time_ns(num_bytes: int, profile: Profile) -> int:
    """Nanoseconds to copy so many bytes from one place to another, in order."""
    curve = profile.curve("straight_copy")
    return _memory_ns(2 * num_bytes, "straight_copy", 0, profile) + _call_ns(curve, 0, profile) if num_bytes else 0


def node_call(
    node: Node,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...],
    tensors: Mapping[str, Tensor],
) -> WorkKey:
    """Everything that the operator's cost depends on, hashable."""
    operands = [tensors[name] for name in node.operands]
    dtypes = [tensor.dtype for tensor in operands]
    result_dtypes = [tensors[name].dtype for name in node.results]
    kernel, multiplied = operator(node.op).work.kernel, operator(node.op).work.multiplied
    return WorkKey(
        kernel(node) if kernel else node.op,
        operand_shapes,
        result_shapes,
        tuple([DTYPE_BYTES[dtype] for dtype in dtypes]),
        tuple([DTYPE_BYTES[dtype] for dtype in result_dtypes]),
        tuple([tensor.differentiable for tensor in operands]),
        (result_dtypes or dtypes or ["float32"])[0] if multiplied is None else dtypes[multiplied],
        _detail(node),
    )


def _detail(node: Node) -> str:
    detail = operator(node.op).work.detail
    return detail(node) if detail else ""


@lru_cache(maxsize=1 << 18)
def call_time_ns(call: WorkKey, profile: Profile) -> tuple[int, int]:
    """Nanoseconds (forward, backward) of a call: as runs have shown (`cost.seen`), else as it is priced."""
    priced = priced_call_ns(call, profile)
    if not profile.seen:
        return priced
    host = profile.seen.host_ns(profile.ranks_sharing)
    forward, backward = (
        _seen_ns(call, side, priced_ns, profile) + (host if priced_ns else 0) for side, priced_ns in enumerate(priced)
    )
    return forward, backward


def _seen_ns(call: WorkKey, direction: int, priced_ns: int, profile: Profile) -> int:
    """Without the host."""
    sharing = profile.ranks_sharing
    exact = profile.seen.by_call.get((call, sharing))
    spent = exact.spent_ns[direction] if exact else None
    if spent is not None and priced_ns:
        return spent
    key = call.op, call.dtype, sharing
    if key not in profile.seen.alike:
        key = _curve_of(call, profile), call.dtype, sharing
    if not priced_ns:
        return priced_ns
    return round(priced_ns * math.exp(log_factor(_ratios(key, direction, profile), math.log(priced_ns))))


def _curve_of(call: WorkKey, profile: Profile) -> str:
    """The name of the family's curve by which a call is priced."""
    kind = operator(call.op).work
    is_view = kind is VIEW or kind.family == "view"
    return "views" if is_view else f"family {profile.curve(kind.family).family}"


def _ratios(key: tuple[str, str, int], direction: int, profile: Profile) -> Ratios:
    """How much longer calls of an operator (or of a family) were seen to take than they are priced, by their price."""
    known = profile.seen_ratios.get((key, direction))
    if known is None:
        op, *others = key
        alike = profile.seen.alike.get(key) or [
            item
            for item in profile.seen.calls
            if [item.call.dtype, item.ranks_sharing] == others and _curve_of(item.call, profile) == op
        ]
        pairs = [(priced_call_ns(item.call, profile)[direction], item.spent_ns[direction]) for item in alike]
        known = in_order((math.log(priced), math.log(spent / priced)) for priced, spent in pairs if priced and spent)
        profile.seen_ratios[key, direction] = known
    return known


@lru_cache(maxsize=1 << 18)
def priced_call_ns(call: WorkKey, profile: Profile) -> tuple[int, int]:
    """Nanoseconds (forward, backward) of a call by curves and tables alone, whatever runs have shown."""
    kind = operator(call.op).work
    view_forward, view_backward = profile.facts.view_ns
    if kind is VIEW:
        return view_forward, view_backward if any(call.differentiable) else 0
    forward = _sustained_ns(_work_ns(call, kind.forward(call), kind.family, 0, profile), kind.family, profile)
    backward = 0
    if any(call.differentiable):
        backward = _sustained_ns(_work_ns(call, kind.backward(call), kind.family, 1, profile), kind.family, profile)
    return (view_forward if kind.family == "view" else forward), backward


def _sustained_ns(duration_ns: int, family: str, profile: Profile) -> int:
    """What takes so long in a burst, in a training step."""
    clock = profile.facts.sustained_clock
    return duration_ns if clock == 1.0 or profile.curve(family).bound == "memory" else round(duration_ns / clock)


@lru_cache(maxsize=1 << 18)
def call_issue_ns(call: WorkKey, profile: Profile) -> tuple[int, int]:
    """Nanoseconds (forward, backward) of the host to launch a call.

    Views launch nothing; the backward pass launches a kernel for each gradient.
    """
    host, kind = profile.host, operator(call.op).work
    if host is None or kind is VIEW:
        return 0, 0
    return host.operator_ns, kind.backward(call).kernels * host.gradient_ns


def _work_ns(call: WorkKey, work: Work, family: str, direction: int, profile: Profile) -> int:
    """Gradients that only pass through cost what a view's do."""
    if work.kernels == 0:
        return profile.facts.view_ns[direction]
    curve = profile.curve(family)
    kernels = (backward_kernels(call) if direction else forward_kernels(call)) if profile.tables else None
    found = found_in(kernels, profile.alike(call.dtype), profile.tables) if kernels else None
    if kernels and found is not None:
        caller = profile.curve("einsum") if operator(call.op).work is EINSUM else curve
        return _kernels_ns(kernels, found, work, curve, caller, direction, call.dtype, profile)
    moving = family if curve.bound == "memory" else "pointwise"
    duration = _memory_ns(work.num_bytes, moving, direction, profile)
    if curve.bound == "memory" and call.dtype in curve.dtype_ratios:  # of float32's time, not of its time a byte
        duration = round(duration * curve.dtype_ratios[call.dtype][direction] * 4 / DTYPE_BYTES[call.dtype])
    if curve.bound == "compute":
        side = curve.backward if direction else curve.forward
        # Each gradient is a kernel of its own, so the curve is asked for one kernel's work.
        products = work.products if family != "attention" else 1
        effective = products * side.effective_work(work.flops / products)
        duration = max(duration, round(effective * 1e9 / profile.peak_flops(call.dtype)))
    duration += sum(_memory_ns(size, "pointwise", 0, profile) for size in work.summed)
    if curve.call_ns is not None and curve.bound == "memory":
        return duration + curve.call_ns[direction]
    return duration + work.kernels * profile.facts.launch_ns[direction]


def launch_ns(call: WorkKey, direction: int, profile: Profile) -> int:
    """What starting the kernels of an operator that moves memory is of its time."""
    kind = operator(call.op).work
    curve = profile.curve(kind.family)
    if curve.call_ns is not None and curve.bound == "memory":
        return curve.call_ns[direction]
    return (kind.backward(call) if direction else kind.forward(call)).kernels * profile.facts.launch_ns[direction]


def _call_ns(curve: OperatorCurve, direction: int, profile: Profile) -> int:
    return (curve.call_ns or profile.facts.launch_ns)[direction]


def _kernels_ns(
    kernels: Kernels,
    found: Sequence[Found],
    work: Work,
    curve: OperatorCurve,
    caller: OperatorCurve,
    direction: int,
    dtype: str,
    profile: Profile,
) -> int:
    """Tables without a dtype are of float32; another takes as much longer as the family's points in both say.

    `caller`: the operator whose calls start the kernels, which are of the family of `curve`. Each gradient of a product
    is a call; those of attention and of a convolution come from one. Beside a grid, as where a product has one row, the
    rate on its border would have operands come faster than memory gives them; inside one of the call's dtype they were
    measured to come from a cache.
    """
    calls = len(found) if curve.family == "matmul" else min(1, len(found))
    computed = sum(kernel.duration_ns for kernel in found)
    if dtype in curve.dtype_ratios and not all(kernel.is_typed for kernel in found):
        computed *= curve.dtype_ratios[dtype][direction]
    summed = sum(
        _memory_ns(size, "column_sum", 0, profile) + _call_ns(profile.curve("column_sum"), 0, profile)
        for size in kernels.summed_bytes
    )
    copied = copy_time_ns(kernels.copied_bytes // 2, profile)
    if not all(kernel.is_inside for kernel in found):
        reach = min(kernel.reach for kernel in found)
        computed = max(computed, work.num_bytes * 1e9 / profile.facts.memory_bandwidth / reach)
        if profile.device_type == "cuda":  # a table drawn on must not end beyond the device's peak
            flops = sum(kernel.repeats * kernel.flops for kernel in found)
            computed = max(computed, flops * 1e9 / profile.peak_flops(dtype))
    return calls * _call_ns(caller, direction, profile) + round(computed) + summed + copied


def _memory_ns(num_bytes: int, family: str, direction: int, profile: Profile) -> int:
    curve = profile.curve(family)
    side = curve.backward if direction else curve.forward
    return round(side.effective_work(num_bytes) * 1e9 / profile.facts.memory_bandwidth)
