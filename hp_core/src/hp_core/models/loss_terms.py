"""Whether a model's own loss is the cross-entropy of its logits, which is what hp trains."""

from __future__ import annotations

from transformers import PreTrainedModel


def loss_fault(model: PreTrainedModel) -> str | None:
    """Which further term the loss of `model` has (`labels=` in plain transformers); None when it has none.

    Transformers' models add the balance loss of their routers when `output_router_logits` is set, and some a z-loss.
    """
    config = model.config.get_text_config()
    coefficients = {name: value for name, value in vars(config).items() if "z_loss_coef" in name and value}
    if getattr(config, "output_router_logits", False):
        coefficients["output_router_logits"] = True
    for name, value in sorted(coefficients.items()):
        return (
            f"{type(model).__name__}: {name}: {value} in its config adds a term to the loss that hp does not compute. "
            f"Set it to {'false' if value is True else 0}."
        )
    return None
