"""Megatron-LM's arguments, of a command, a shell script or its YAML: read, and the changes that say another job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.auditing.job import JobFile, ModelSizes, TrainingJob
from autopar.auditing.megatron_stages import BY_HAND, stages_said
from autopar.auditing.shell import UNKNOWN, Script, ScriptCommand, Word, read_script
from autopar.auditing.taking import KnownKey, Taker, beside, missing
from autopar.auditing.values import FileValue, line_of, yaml_values
from autopar.errors import PlanError

FORM = "shell"
MARKS = ("num-layers", "tensor-model-parallel-size", "hidden-size")
"""Arguments by which a command is Megatron's."""
UNTOLD = "a variable"
"""In the place of arguments that only running the script would tell."""

_VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000, "GPTSentencePieceTokenizer": 32_000,
                 "SentencePieceTokenizer": 32_000}  # fmt: skip

KNOWN = [
    KnownKey(UNTOLD, "unknown", "whose value only running the script tells: it may hold more arguments"),
    *missing("optimizer or activations on the host: planned as if all were on the device", "optimizer-cpu-offload",
             "cpu-offloading", "cpu-offloading-num-layers", "offload-*", "fine-grained-activation-offloading"),
    *missing("attention over a latent", "multi-latent-attention", "q-lora-rank", "kv-lora-rank"),
    *missing("more tokens predicted at once", "mtp-num-layers"),
    *missing("layers of other kinds", "hybrid-*", "is-hybrid-model", "mamba-*", "window-size", "retro-*"),
    *missing("experts that all tokens pass", "moe-shared-expert-intermediate-size"),
    *missing("tokens beyond a capacity are dropped", "moe-expert-capacity-factor", "moe-token-dropping"),
    *missing("a batch that grows as training goes on: planned at its full size", "rampup-batch-size",
        "decrease-batch-size-if-needed"),
    *missing("tensor parallelism of experts beside that of attention", "expert-tensor-parallel-size", off=(1, "1",
        None)),
    *missing("norms of queries and keys", "qk-layernorm"),
    *missing("activations of tensor-parallel ranks stored in parts", "distribute-saved-activations"),
    *missing("CUDA graphs", "enable-cuda-graph", "external-cuda-graph", "cuda-graph-impl"),
    *missing("state in fewer bits", "use-precision-aware-optimizer", "*-params-dtype", "exp-avg*-dtype"),
    *beside("fp8-*", "fp8_*", "fp4-*", "moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-z-loss-coeff",
            "moe-token-dispatcher-type", "moe-grouped-gemm", "moe-permute-fusion", "moe-router-*",
            "moe-input-jitter-eps",
            "moe-*fusion", why="how it is computed, which the cost model decides"),
    *beside("overlap-param-gather*", "no-overlap-p2p*", "tp-comm-*", "no-*fusion", "*fusion", "delay-*",
            "batch-p2p-*", "overlap-p2p*",
            "use-flash-attn", "attention-backend", "attention-softmax-in-fp32", "transformer-impl", "use-mcore-models",
            "use-legacy-models", "spec", "async-tensor-model-parallel-allreduce", "align-*", "scatter-gather-*",
            "ddp-*", "no-scatter-*", "nccl-*", "defer-embedding*", "manual-gc*", "empty-unused-memory-level",
            "deallocate-*", "use-ring-exchange-p2p", "use-tp-pp-dp-mapping", "high-priority-stream-groups",
            why="how it is computed or sent, which the cost model decides"),
    *beside("*lr*", "weight-decay*", "*weight-decay*", "adam-*", "sgd-*", "clip-grad", "init-method*", "*init-method*",
            "*loss-scale*", "hysteresis", "override-opt*", "use-checkpoint-*", "*norm-epsilon", "start-*", "end-*",
            "calculate-per-token-loss", "seed", "rotary-*", "use-rope-scaling", "rope-*", "*-dropout", "rotary*",
            "apply-layernorm-1p", "layernorm-zero-centered-gamma", "apply-query-key-layer-scaling",
            "fp32-residual-connection", "apply-residual-*", "muon-*", "onnx-safe", "perform-initialization"),
    *beside("train-*", "eval-*", "save*", "load*", "*interval*", "log-*", "tensorboard*", "timing-*", "wandb*",
            "*data-path", "data-*", "split", "vocab-*", "merge-*", "tokenizer*", "tiktoken*", "mock-data",
            "num-workers",
            "ckpt-*", "*ckpt*", "async-save", "no-load-*", "no-save-*", "exit-*", "profile*", "distributed-*",
            "use-pytorch-profiler", "finetune", "master*", "node-rank", "rdzv-*", "max-restarts", "tee", "local-rank",
            "one-logger-*", "enable-one-logger", "*attention-mask*", "*mmap*", "dataloader-type", "reset-*", "eod-*",
            "skip-train", "adlr-*", "check-for-*", "cache-*", "test-mode", "deterministic-mode", "use-cpu-init*",
            "result*", "deepspeed*", "barrier-*", "timers", "no-bias-*", "bert-*", "retriever-*", "mask-prob",
            "short-seq-prob", "sample-rate", "*-func", "pipeline-dtype", "autocast-dtype", "enable-autocast",
            "params-dtype", "variable-seq-lengths", "clone-scatter-*", "lazy-mpu-init", "*cpu-initialization",
            "memory-efficient-layer-norm", "persist-layer-norm", "initial-*", "min-*", "encoder-num-layers",
            "decoder-num-layers", "encoder-seq-length", "decoder-seq-length", "pipeline-model-parallel-split-rank",
            "num-microbatches-with-*", "rotary-seq-len-*", "add-position-embedding", "fp16-lm-cross-entropy",
            "dist-ckpt*", "auto-detect*", "use-dist-ckpt", "use-persistent*", "python-*", "cpu-offloading-*",
            "_cpu_offloading_context", "no-check-for-nan*", "moe-layer-recompute", "module", "log_dir", "run-path"),
    *missing("attention in blocks of a group", "context-parallel-sharding"),
]  # fmt: skip


def read(name: str, text: str) -> JobFile:
    """A shell script or command line as a job."""
    script = read_script(text)
    command = _training(script, name)
    values = arguments_of(command, text)
    taker = Taker(name, text, values)
    for place, what in script.not_followed:
        found = FileValue(what, "", line_of(text, place))
        taker.note("unknown", "not followed: only running it would tell", found=found)
    for item in values.values():
        if "\ufffd" in str(item.value) and not _is_path(item.key):
            taker.note("unknown", "given from outside of the script: not known here", found=item)
    return taker.file(_job(taker), KNOWN)


def read_yaml(name: str, text: str) -> JobFile:
    """Megatron-LM's YAML as a job: groups do not matter, names are those of the arguments."""
    values = {}
    for key, item in yaml_values(text, name).items():
        plain = key.rpartition(".")[2].strip("_-").replace("_", "-")
        values[plain] = replace(item, key=plain)
    taker = Taker(name, text, {key: item for key, item in values.items() if item.value is not None})
    return taker.file(_job(taker, is_yaml=True), KNOWN)


def _is_path(key: str) -> bool:
    return any(
        word in key for word in ("path", "file", "dir", "save", "load", "addr", "port", "rank", "tokenizer", "wandb")
    )


# Arguments ----------------------------------------


def _training(script: Script, name: str) -> ScriptCommand:
    """The command with most of Megatron's arguments."""

    def marks(command: ScriptCommand) -> int:
        return sum(word.text.lstrip("-").partition("=")[0].replace("_", "-") in MARKS for word in command.words)

    best = max(script.commands, key=marks, default=None)
    if best is None or not marks(best):
        raise PlanError(
            f"expected a command with Megatron's arguments, such as --num-layers, in {name}, found none; a script that "
            "sources others has to be given with them put in"
        )
    return best


def _of_first(words: Sequence[Word]) -> Sequence[Word]:
    """The words before a pipe or a redirection in a text that the script evaluates."""
    ends = (at for at, word in enumerate(words) if re.fullmatch(r"[|;&]+|[0-9&]?>.*", word.text))
    return words[: next(ends, len(words))]


def arguments_of(command: ScriptCommand, text: str) -> dict[str, FileValue]:
    """Arguments by name, without dashes before it and with dashes in it; True where none follows. The last one of a
    name counts, as it does for argparse."""
    found = dict[str, FileValue]()
    words, at = _of_first(command.words), 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z_]", word.text):
            continue
        key, equals, value = word.text.partition("=")
        key = key.lstrip("-").replace("_", "-")
        line = line_of(text, word.span[0]) if word.span else 0
        if equals:
            start = word.span[1] - len(value) if word.span else 0
            found[key] = FileValue(key, value, line, (start, word.span[1]) if word.span and value else None)
            continue
        own = list[Word]()
        while at < len(words) and not re.match(r"--?[A-Za-z_]|.*\.py$", words[at].text):
            if own and not words[at].text.strip(UNKNOWN.text):
                found[UNTOLD] = FileValue(UNTOLD, "", line, None)  # more arguments, or none: no value of this one
            else:
                own.append(words[at])
            at += 1
        if not own:
            found[key] = FileValue(key, True, line, word.span)
        elif len(own) == 1:
            found[key] = FileValue(key, own[0].text, line, own[0].span)
        else:
            found[key] = FileValue(key, " ".join(one.text for one in own), line)
    return found


# The job ----------------------------------------


def _job(taker: Taker, is_yaml: bool = False) -> TrainingJob:
    tp = taker.whole("tp", "tensor-model-parallel-size", "model-parallel-size", default=1)
    pp = taker.whole("pp", "pipeline-model-parallel-size", default=1)
    model = _model(taker, tp)
    chunks, stage_layers, weights = stages_said(taker, pp, model)
    zero = _zero(taker)
    cp = taker.whole("cp", "context-parallel-size", default=1)
    ways = {"p2p": "ring", "all_gather": "gather", "a2a": "heads", "a2a+p2p": "ring"}
    recompute, layers = _recompute(taker)
    shards = taker.whole("instances", "num-distributed-optimizer-instances", default=1)
    job = TrainingJob(
        "megatron", model, nodes=taker.whole("nodes", "nnodes", absent=(UNKNOWN.text,)),
        per_node=taker.whole("per_node", "nproc-per-node", absent=(UNKNOWN.text,)),
        replicate=shards if zero and shards > 1 else None, zero=zero, tp=tp,
        sequence_parallel=taker.true("sequence_parallel", "sequence-parallel") and tp > 1, pp=pp, chunks=chunks,
        stage_layers=stage_layers, end_weights=weights, schedule="interleaved" if chunks > 1 else "1f1b", cp=cp,
        context=taker.word("context", "cp-comm-type", choices=ways, default="ring"),
        ep=taker.whole("ep", "expert-model-parallel-size", default=1),
        micro_batch=taker.whole("micro_batch", "micro-batch-size", default=1),
        global_batch=taker.whole("global_batch", "global-batch-size"), seq=taker.whole("seq", "seq-length"),
        recompute=recompute, recompute_layers=layers, precision=_precision(taker), optimizer=_optimizer(taker),
        overlaps_sums=taker.true("overlaps", "overlap-grad-reduce"),
    )  # fmt: skip
    _asserted(taker, job)
    if is_yaml:
        job = replace(job, nodes=None, per_node=None)
    world = taker.whole("world", "world-size")
    return replace(job, nodes=1, per_node=world) if world and not job.devices and world <= 8 else job


def _zero(taker: Taker) -> int:
    sharded = taker.word("zero", "data-parallel-sharding-strategy", default=None, choices={
        "no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3})  # fmt: skip
    whole = taker.true("fsdp", "use-torch-fsdp2") or taker.true("fsdp", "use-megatron-fsdp", "use-custom-fsdp")
    if taker.true("zero", "use-distributed-optimizer") and not whole:
        return 1
    return int(sharded) if sharded is not None else 3 if whole else 0


def _asserted(taker: Taker, job: TrainingJob) -> None:
    """What Megatron-LM's validate_args refuses beside what has to divide what."""
    longest = taker.whole("positions", "max-position-embeddings")
    if job.seq and longest and longest < job.seq:
        taker.fault("positions", f"at least the sequence's {job.seq}", longest, f"use {job.seq}",
                    "max-position-embeddings", "seq-length")  # fmt: skip
    if taker.values.get("overlap-param-gather") and taker.true("gathers", "overlap-param-gather") and job.zero < 2:
        absent = [*(["use-distributed-optimizer"] if job.zero != 1 else []),
                  *([] if job.overlaps_sums else ["overlap-grad-reduce"])]  # fmt: skip
        if absent:
            flags = " and ".join(f"--{name}" for name in absent)
            taker.fault("gathers", f"{flags} beside --overlap-param-gather", "none", f"add {flags}",
                        "overlap-param-gather")  # fmt: skip


def _recompute(taker: Taker) -> tuple[str, int | None]:
    names = "recompute-granularity", "activations-checkpoint-granularity"
    kind = taker.word("recompute", *names, default="none", choices={"full": "full", "selective": "selective"})
    method = taker.word("method", "recompute-method", "activations-checkpoint-method", default=None)
    if kind == "full" and method is None:
        taker.fault("recomputation", "--recompute-method uniform or block beside full", "none",
                    "add --recompute-method uniform --recompute-num-layers 1", *names)  # fmt: skip
    count = taker.whole("recompute_layers", "recompute-num-layers", "activations-checkpoint-num-layers")
    modules = taker.given("recompute-modules")
    if taker.true("recompute", "recompute-activations"):
        kind = "selective"
    is_old = "activations-checkpoint-method" in taker.values and not taker.given(*names)
    if taker.true("recompute", "checkpoint-activations") or (method and kind == "none" and is_old):
        kind = "full"
    elif method and kind == "none":
        taker.note("does not matter", "nothing is computed again without --recompute-granularity", "recompute-method")
    if kind == "selective":
        cheap = modules is not None and "core_attn" not in str(modules.value)
        why = (
            "planned as what is cheap to compute again"
            if cheap
            else ("attention's own products are computed again, which fused attention does anyhow: planned as none")
        )
        taker.note("approximated", why, "recompute-modules", "recompute-granularity", "recompute-activations")
        return ("selective" if cheap else "none"), None
    if kind == "full" and method == "block":
        return "full", count
    if kind == "full" and (count or 1) > 1:
        taker.note("approximated", "groups of several layers are planned as groups of one, which keep more",
                   "recompute-num-layers", "activations-checkpoint-num-layers")  # fmt: skip
    return str(kind), None


def _precision(taker: Taker) -> str:
    eighth = taker.given("fp8-format", "fp8")
    if eighth is not None and eighth.value is not False:
        taker.note("no equivalent", "products in 8 bits: planned in bfloat16, which is slower", found=eighth)
    if taker.true("summed16", "grad-reduce-in-bf16"):
        taker.note("no equivalent", "gradients are summed in float32 here, twice the bytes", "grad-reduce-in-bf16")
    taker.true("summed32", "accumulate-allreduce-grads-in-fp32")
    half, brain = taker.true("precision", "fp16"), taker.true("precision", "bf16")
    if half and brain:
        taker.fault("precision", "fp16 or bf16", "both", "leave one out", "fp16", "bf16")
    if half:
        taker.note("approximated", "fp16 is planned as bfloat16, which takes as long and as much", "fp16")
    return "bf16" if half or brain else "fp32"


def _optimizer(taker: Taker) -> str:
    found = taker.given("optimizer")
    kinds = {"adam": "adamw", "sgd": "sgd"}
    if found is not None and str(found.value) not in kinds:
        taker.note("no equivalent", "another optimizer: planned with AdamW's state and work", "optimizer")
        return "adamw"
    return kinds[str(found.value)] if found else "adamw"


# The model ----------------------------------------


def _model(taker: Taker, tp: int) -> ModelSizes | None:
    layers = taker.whole("model", "num-layers")
    hidden = taker.whole("model.hidden_size", "hidden-size")
    heads = taker.whole("model.num_attention_heads", "num-attention-heads")
    ffn = taker.whole("model.intermediate_size", "ffn-hidden-size")
    width = taker.whole("model.head_dim", "kv-channels")
    groups = taker.whole("model.num_key_value_heads", "num-query-groups")
    is_grouped = taker.true("grouped", "group-query-attention")
    kind = _kind(taker)
    experts = _experts(taker)
    vocab = _vocabulary(taker, tp)
    if layers is None or hidden is None or heads is None:
        return None
    gated_width = int(4 * hidden * 2 / 3) // 64 * 64
    ffn = ffn or (gated_width if kind["is_gated"] else 4 * hidden)
    if experts:
        experts["expert_ffn"] = experts["expert_ffn"] or ffn
    kv_heads = (groups or 1) if is_grouped else heads
    return ModelSizes(layers, hidden, heads, kv_heads, width or hidden // heads, ffn, vocab, **kind, **experts)


def _kind(taker: Taker) -> dict[str, Any]:
    """What layers are made of."""
    is_gated = taker.true("gated", "swiglu") or taker.true("gated", "gated-linear-unit")
    squared, plain = taker.true("activation", "squared-relu"), taker.true("activation", "openai-gelu")
    norm = taker.word("norm", "normalization", choices={"LayerNorm": "layer", "RMSNorm": "rms"}, default="layer")
    rotary = taker.true("positions", "use-rotary-position-embeddings")
    positions = taker.word("positions", "position-embedding-type", default="learned_absolute", choices={
        "learned_absolute": "learned", "rope": "rotary", "none": "none", "yarn": "rotary", "mrope": "rotary",
        "relative": "none"})  # fmt: skip
    if taker.true("positions", "no-position-embedding") and positions == "learned_absolute":
        positions = "none"
    positions = "rotary" if rotary else "learned" if positions == "learned_absolute" else positions
    biases = taker.given("add-bias-linear")
    has_bias = not taker.true("bias", "disable-bias-linear") and (biases is None or biases.value is not False)
    taker.true("bias", "add-qkv-bias")
    taker.given("activation-func")
    return {
        "is_gated": is_gated, "norm": norm, "positions": positions, "has_bias": has_bias,
        "activation": "squared_relu" if squared else "gelu_tanh" if plain else "gelu",
        "is_tied": not taker.true("tied", "untie-embeddings-and-output-weights"),
        "max_positions": taker.whole("positions", "max-position-embeddings", default=0),
    }  # fmt: skip


def _experts(taker: Taker) -> dict[str, Any]:
    count = taker.whole("model.experts", "num-experts", "num-moe-experts")
    chosen = taker.whole("chosen", "moe-router-topk", default=2)
    width = taker.whole("model.expert_ffn", "moe-ffn-hidden-size")
    every = taker.given("moe-layer-freq")
    if count and every is not None and str(every.value) != "1":
        taker.note("no equivalent", "experts in some layers alone: planned in all", "moe-layer-freq")
    return {"experts": count, "chosen_experts": chosen, "expert_ffn": width or 0} if count else {}


def _vocabulary(taker: Taker, tp: int) -> int:
    """Padded as Megatron pads it, so that tensor parallelism divides it."""
    padded = taker.whole("model.vocab_size", "padded-vocab-size")
    if padded:
        return int(padded)
    size = taker.whole("model.vocab_size", "vocab-size")
    kind = taker.given("tokenizer-type")
    if size is None:
        size = _VOCABULARIES.get(str(kind.value) if kind else "GPT2BPETokenizer", 128_256)
        taker.note("assumed",
            f"a vocabulary of {size:,}: the file names a tokenizer, not its size; --vocab-size says it",
                   "tokenizer-type", "vocab-size")  # fmt: skip
    multiple = taker.whole("padding", "make-vocab-size-divisible-by", default=128) * tp
    return int(-(-size // multiple) * multiple)


# Writing ----------------------------------------


def changes(old: TrainingJob, new: TrainingJob, file: JobFile) -> dict[str, Any]:
    """What to write so that the arguments say the new job: by name; True for one without a value, None for none."""
    found: dict[str, Any] = {
        "tensor-model-parallel-size": new.tp, "pipeline-model-parallel-size": new.pp, "context-parallel-size": new.cp,
        "micro-batch-size": new.micro_batch, "global-batch-size": new.global_batch,
        "sequence-parallel": new.sequence_parallel or None,
    }  # fmt: skip
    if old.model and old.model.experts:
        found["expert-model-parallel-size"] = new.ep
    if old.stage_layers is not None and new.stage_layers is None:
        found |= dict.fromkeys(BY_HAND)
    if new.zero != old.zero:
        found["use-distributed-optimizer"] = True if new.zero == 1 else None
    found |= {**_written_stages(new, old), **_written_recompute(new, old)}
    return found


def _written_stages(new: TrainingJob, old: TrainingJob) -> Mapping[str, Any]:
    names = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
    if new.chunks == 1:
        return dict.fromkeys(names) if old.chunks > 1 else {}
    layers = new.model.layers // new.pp // new.chunks if new.model else 1
    return {names[0]: layers, names[1]: None}


def _written_recompute(new: TrainingJob, old: TrainingJob) -> Mapping[str, Any]:
    if (new.recompute, new.recompute_layers) == (old.recompute, old.recompute_layers):
        return {}
    names = ("recompute-granularity", "recompute-method", "recompute-num-layers")
    others = dict.fromkeys(("recompute-activations", "recompute-modules", "checkpoint-activations",
                            "activations-checkpoint-method", "activations-checkpoint-num-layers"))  # fmt: skip
    if new.recompute == "full":
        return {**others, **dict(zip(names, ("full", "uniform", 1), strict=True))}
    return {**others, **dict.fromkeys(names)}
