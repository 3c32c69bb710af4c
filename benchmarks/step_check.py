"""Is the fast path right? Compiled layers, masks and loss on a device against float64 references on a small size.

    python benchmarks/step_check.py [--device cuda] [--backend inductor]

One line a comparison: the norm of the difference relative to the reference's norm, and its limit. Exit 1 if any
is above its limit. benchmarks/step.py --check runs it first.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_lib import blocks, drafter, layer, loss
from dflash_lib.head import Head

ROWS, LENGTH, ANCHORS, HIDDEN, VOCABULARY, GAMMA = 2, 640, 50, 128, 1000, 7.0
FAILED = []


def difference(got: Tensor, want: Tensor) -> float:
    """Norm of the difference, relative to that of what is wanted; infinite if anything is not finite."""
    got, want = got.detach().double(), want.detach().double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def report(name: str, error: float, limit: float) -> None:
    good = error <= limit
    print(f"  {'ok ' if good else 'BAD'} {name}: {error:.1e} (limit {limit:.0e})", flush=True)
    if not good:
        FAILED.append(name)


def case(block_size: int, device: str) -> tuple[blocks.Blocks, Tensor]:
    """Packed rows, one with absent blocks."""
    generator = torch.Generator().manual_seed(block_size)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    documents = (torch.arange(LENGTH) // 230).expand(ROWS, LENGTH).contiguous()
    response = torch.rand(ROWS, LENGTH, generator=generator) < 0.9
    response[1, 45:] = False
    anchors, keep = blocks.draw_anchors(response, ANCHORS, seed=0, epoch=0, row_ids=range(ROWS), document_ids=documents)
    assert not keep.all() and keep[0].all()
    made = blocks.make_blocks(
        ids, response, anchors, keep, block_size=block_size, gamma=GAMMA, mask_token_id=7, document_ids=documents
    )
    return made.to(device), documents.to(device)


def check_drafter(block_size: int, device: str, backend: str, window: int | None) -> None:
    """Hidden states and parameter gradients of the compiled drafter, in float32 and bfloat16, against float64."""
    batch, documents = case(block_size, device)
    on_gpu = device.startswith("cuda")
    generator = torch.Generator(device).manual_seed(1)
    features = torch.randn(ROWS, LENGTH, 2 * HIDDEN, generator=generator, device=device, dtype=torch.float64)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator, device=device, dtype=torch.float64)
    direction = torch.randn(ROWS, ANCHORS * block_size, HIDDEN, generator=generator, device=device, dtype=torch.float64)
    config = drafter.DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        target_layer_ids=(0, 1),
        num_target_layers=3,
        target_hidden_size=HIDDEN,
        mask_token_id=7,
        block_size=block_size,
        dtype=torch.float64,
    )
    reference = drafter.Drafter(config, device=device)
    arguments = (batch.anchors, batch.keep, LENGTH, block_size, documents, window)
    positions = blocks.context_positions(documents, LENGTH, ROWS)

    def run(model: drafter.Drafter, mask: object, run_layer: object = None) -> tuple[Tensor, dict[str, Tensor]]:
        dtype = model.config.dtype
        hidden = model(
            features.to(dtype), embedding.to(dtype)[batch.inputs], positions, batch.positions, mask, layer=run_layer
        )
        hidden.backward(direction.to(dtype))
        return hidden, {name: parameter.grad for name, parameter in model.named_parameters()}

    want, want_slope = run(reference, blocks.visible_dense(*arguments))
    limits = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
    for dtype in (torch.float32, torch.bfloat16) if window is None else (torch.float32,):  # compiles cost time
        limit = limits[dtype]
        model = drafter.Drafter(dataclasses.replace(config, dtype=dtype), device=device)
        model.load_state_dict({name: value.float() for name, value in reference.state_dict().items()})
        compiled = torch.compile(layer.layer_forward, backend=backend, dynamic=False, fullgraph=True)
        mask = (blocks.block_mask if on_gpu else blocks.visible_dense)(*arguments)
        got, slope = run(model, mask, compiled)
        name = f"drafter B{block_size} window {window} {str(dtype)[6:]}"
        report(f"{name} hidden", difference(got, want), limit)
        worst = max(want_slope, key=lambda key: difference(slope[key], want_slope[key]))
        report(f"{name} gradient (worst: {worst})", difference(slope[worst], want_slope[worst]), limit)


def check_loss(device: str, backend: str) -> None:
    """Loss and gradient of every objective, compiled, against autograd in float64 on full logits."""
    block_size = 16
    batch, _ = case(block_size, device)
    generator = torch.Generator(device).manual_seed(2)
    size = (ROWS, ANCHORS * block_size, HIDDEN)
    hidden = torch.randn(size, generator=generator, device=device)
    teacher = torch.randn(size, generator=generator, device=device)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, device=device) * 0.2
    compiled = torch.compile(loss.loss_chunk, backend=backend, dynamic=False, fullgraph=True)
    for objective in loss.OBJECTIVES:
        wide = hidden.double().requires_grad_()
        scores = (wide @ weight.double().T).log_softmax(-1)
        target = (teacher.double() @ weight.double().T).log_softmax(-1)
        right = scores.gather(-1, batch.labels[..., None]).squeeze(-1)
        weights = batch.weights.double()
        if objective == "dpace":
            shape = (-1, block_size)
            made = loss.dpace_weights(right.detach().exp().view(shape)[:, 1:], weights.view(shape)[:, 1:] > 0, 0.5)
            weights = torch.nn.functional.pad(made, (1, 0)).view_as(weights)
        parts = {
            "ce": -right,
            "dpace": -right,
            "forward_kl": (target.exp() * (target - scores)).sum(-1),
            "reverse_kl": (scores.exp() * (scores - target)).sum(-1),
            "tv": 0.5 * (scores.exp() - target.exp()).abs().sum(-1),
        }
        want = (parts[objective] * weights).sum()
        want.backward()
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
            if dtype == torch.bfloat16 and objective != "ce":
                continue  # the same code, and a compile each
            narrow = hidden.to(dtype).clone().requires_grad_()
            result = loss.drafter_loss(
                narrow,
                Head(weight.to(dtype)),
                batch.labels,
                batch.weights,
                block_size=block_size,
                objective=objective,
                target_hidden=teacher.to(dtype),
                chunk_blocks=32,
                chunk=compiled,
            )
            result.loss_sum.backward()
            report(f"{objective} {str(dtype)[6:]} loss", difference(result.loss_sum, want), limit)
            report(f"{objective} {str(dtype)[6:]} gradient", difference(narrow.grad, wide.grad), limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--timeout", type=float, default=240, help="seconds after which it writes its stacks and ends")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch._dynamo.config.recompile_limit = 64
    for block_size, window in ((16, None), (10, 100)):
        check_drafter(block_size, args.device, args.backend, window)
    check_loss(args.device, args.backend)
    print(f"check: {'FAILED ' + ', '.join(FAILED) if FAILED else 'all within limits'}")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
