"""What a mixture of experts does on one device: products, element-wise work, launches and what it sends."""

from __future__ import annotations

import numpy as np

from meshwright.cost.met import Routed, met
from meshwright.cost.norm_work import norm_parameters
from meshwright.cost.work import PAIR, FloatArray, PartWork, Product, Sizes
from meshwright.spec.model import FeedForward, Mixture

MIXTURE = "mixture"


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
    copies = part.top_k * part.routing.kept_share
    routed = m * copies * slices / t
    active = np.minimum(experts, routed)
    rows = routed / active
    products = [
        Product(m=m / np.where(grid, t, 1.0), n=sizes.zeros + part.experts, k=w),
        Product(m=rows, n=h, k=w, count=active * (2.0 if part.gated else 1.0), together=active),
        Product(m=rows, n=w, k=h, count=active, together=active),
    ]
    replicated = float(part.width * part.experts + part.gate_parameters + part.extra_parameters)
    replicated += part.width if part.shared_gate else 0
    biases = float(part.experts * part.width if part.expert_bias else 0)
    laid_out = _laid_out_rows(part, holders, sizes)
    traffic = e * (routed * (laid_out * w + (5.0 if part.gated else 2.0) * h) + 3.0 * m * w / sizes.split)
    normed = m / np.where(grid, t, 1.0) * len(part.inner_norms)
    traffic, normed = traffic + 2.0 * e * normed * w, e * normed * w
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
    sent = np.where(grid, e * m / t * copies * w, 0.0)
    apart = sizes.biases_apart and part.expert_bias
    added, summed = _bias_apart_bytes(sizes) if apart else (0.0, 0.0)
    return PartWork(
        name=MIXTURE,
        parameters=own / t + replicated + on_grid,
        products=tuple(products),
        traffic=traffic + routed * w * added,
        backward_traffic=2.0 * traffic - normed + routed * w * summed,
        kernels=24.0 + 2.0 * len(part.inner_norms) + (2.0 if part.expert_scale else 0.0) + 2.0 * apart * active,
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


def _laid_out_rows(part: Mixture, holders: FloatArray, sizes: Sizes) -> FloatArray:
    """Rows read and written to lie by expert and back as they came, for each row that an expert multiplies.

    Sorted before they are sent and after they came, and back the same ways, are 8. A token that crosses once lies
    where it arrived and is copied to every expert of that rank, and their results are added up there.
    """
    once = met(holders, Routed(part.top_k, part.routing.groups, part.routing.chosen_groups))
    return 2.0 + 2.0 * once if sizes.dispatches_once else 8.0 + 0.0 * once


def _bias_apart_bytes(sizes: Sizes) -> tuple[FloatArray, FloatArray]:
    """Bytes an element of what an expert gives, where its bias is scaled by the router and added expert by expert in
    fp32, and all are joined and narrowed (TEGroupedMLP._apply_bias of Megatron-Core); forward and backward.

    Backward widens, multiplies with the bias and with the router's weights, and sums either product.
    """
    e, wide = sizes.itemsize, sizes.wide
    return wide + (e + 2.0 * wide) + 2.0 * wide + sizes.casts, 2.0 * sizes.casts + 6.0 * wide


def entering(part: FeedForward, before: str = "") -> tuple[str, ...]:
    """Matrices whose product is the hidden features."""
    return (f"{before}gate", f"{before}up") if part.gated else (f"{before}up",)
