"""What a mixture of experts does on one device: products, element-wise work, launches and what it sends."""

from __future__ import annotations

import numpy as np

from meshwright.cost.mixture_rows import has_biases_apart, has_masks, row_bytes
from meshwright.cost.norm_work import norm_parameters
from meshwright.cost.received import received_choices
from meshwright.cost.work import PAIR, FloatArray, PartWork, Product, Sizes
from meshwright.spec.model import FeedForward, Mixture

MIXTURE = "mixture"
_KERNELS = 24.0  # that a mixture starts forward, those of norms inside, scales and biases of experts apart


def mixture_work(part: Mixture, sizes: Sizes) -> PartWork:
    """Tokens spread evenly over the experts.

    Without a grid of experts every device holds a slice of every expert, and tokens stay where they are. With one, a
    tensor rank sends its share of the tokens to their experts, whose tensor ranks gather what they are sent.
    """
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    grid = np.asarray(sizes.expert + sizes.zeros) > 0.0
    slices = np.where(grid, sizes.expert_tensor, t)
    holders = np.where(grid, sizes.expert, 1.0)
    w, h = sizes.zeros + part.width, part.hidden / slices
    experts = part.experts / holders
    masked, capacity = has_masks(part, sizes), 1.0 if part.routing.capacity is None else part.routing.capacity
    copies = part.top_k * (capacity if masked else part.routing.kept_share)
    block = 1 if masked else sizes.experts.block
    routed = m * copies * slices / t
    active = np.minimum(experts, routed)
    rows = routed / active
    most = 1.0 if masked else np.where(grid, received_choices(part, sizes) / routed, 1.0)
    products = [
        Product(m=m / np.where(grid, t, 1.0), n=sizes.zeros + part.experts, k=w),
        Product(m=rows, n=h, k=w, count=active * (2.0 if part.gated else 1.0), together=active, block=block, most=most),
        Product(m=rows, n=w, k=h, count=active, together=active, block=block, most=most),
    ]
    products += _masks(w, sizes, copies=copies) if masked else []
    replicated = float(part.width * (part.experts + part.shared_gate) + part.gate_parameters + part.extra_parameters)
    biases = float(part.experts * part.width if part.expert_bias else 0)
    normed = e * m / np.where(grid, t, 1.0) * len(part.inner_norms) * w
    traffic = 3.0 * e * m * w / sizes.split + 2.0 * normed
    matrices = float(part.experts * part.expert_parameters) - biases
    own = part.parameters - norm_parameters(part) - replicated - biases - matrices
    on_grid = matrices / (slices * holders) + biases / holders
    if part.shared is not None:
        shared = part.shared.hidden / t
        products += [
            Product(m=m, n=shared, k=w, count=2.0 if part.shared.gated else 1.0, of=entering(part.shared, "shared.")),
            Product(m=m, n=w, k=shared, of=("shared.down",)),
        ]
        traffic = traffic + e * m * (5.0 * shared + w)
        if part.shared_gate:
            products.append(Product(m=m, n=sizes.zeros + 1.0, k=w))
    sent, apart = np.where(grid, e * m / t * copies * w, 0.0), has_biases_apart(part, sizes)
    each = row_bytes(part, sizes, hidden=h, holders=holders)
    return PartWork(
        name=MIXTURE,
        parameters=own / t + replicated + on_grid,
        products=tuple(products),
        traffic=traffic + routed * each.forward,
        backward_traffic=2.0 * traffic - normed + routed * each.backward,
        kernels=_KERNELS + 2.0 * len(part.inner_norms) + (2.0 if part.expert_scale else 0.0) + 2.0 * apart * active,
        exchanges=PAIR,
        closes=part.shared is not None and not part.shared_gate and part.post_norm is None,
        expert_parameters=on_grid,
        dispatched=sent,
        copies=copies,
        groups=float(part.routing.groups),
        chosen_groups=float(part.routing.chosen_groups),
        regathered=np.where(grid, e * routed * w, 0.0),
        exchanged=np.where(grid & (part.shared is None), 0.0, 1.0),
    )


def _masks(width: FloatArray, sizes: Sizes, *, copies: float) -> list[Product]:
    """Products of every sequence with a mask of its tokens by all places at experts, there and back: the choice has no
    gradient, the router's weights have."""
    tokens = sizes.zeros + sizes.sequence / sizes.context
    there = Product(m=width, n=tokens * copies, k=tokens, count=sizes.batch, given=True)
    return [there, Product(m=tokens, n=width, k=tokens * copies, count=sizes.batch)]


def entering(part: FeedForward, before: str = "") -> tuple[str, ...]:
    """Matrices whose product is the hidden features."""
    return (f"{before}gate", f"{before}up") if part.gated else (f"{before}up",)
