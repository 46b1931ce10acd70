"""The layers whose weight gradient can wait, a rule for each: what I computes, and notes, and what W computes.

A rule holds for one exact type. A subclass may compute something else, so it has none. But a layer that sends
something before and after such a computation may say so itself (`modules.split`): the rule then holds for the
middle, and what is sent backward is sent in I.

`choose_layers` says which layers of a module can wait: those with a rule, whose forward is their own, outside of
compiled code, and that share no parameter with a layer that cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distlab.blocks.modules.split import LocalCompute


class Notes(NamedTuple):
    """What a layer's backward leaves for W.

    Attributes:
        rule: turns the notes into gradients.
        layer: whose parameters they are for.
        x: the layer's input.
        gradient: of the layer's output.
    """

    rule: LayerRule
    layer: Any
    x: Tensor
    gradient: Tensor


class LayerRule(Protocol):
    """How a kind of layer splits its backward pass."""

    def refuses(self, layer: Any) -> str | None:
        """Return why this very layer cannot wait, or None."""

    def input_gradient(self, layer: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""

    def weight_gradients(self, notes: Notes, sums: Sums) -> None:
        """Add the gradients of the layer's parameters."""


class Sums:
    """Adds gradients to parameters: at once, or where a parameter has hooks all at the end.

    Hooks must see the whole gradient of a W, once. autograd runs them when it hands a gradient to a leaf, so it is
    asked to.

    Args:
        holds_all: give no parameter its gradient; the caller takes them (`take`).
    """

    def __init__(self, *, holds_all: bool = False) -> None:
        self._held: dict[nn.Parameter, Tensor] = {}
        self._holds_all = holds_all

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient."""
        before, gradient = self._before(parameter), gradient.to(parameter.dtype)
        if before is not None:
            before.add_(gradient)
        elif self._holds(parameter):
            self._held[parameter] = gradient
        else:
            parameter.grad = gradient

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left @ right: in one pass over memory where it can be."""
        before = self._before(parameter)
        if before is not None and before.dtype == left.dtype:
            before.addmm_(left, right)
        else:
            self.add(parameter, left @ right)

    def deliver(self) -> None:
        """Hand parameters with hooks their gradients."""
        if self._held:
            torch.autograd.backward(list(self._held), list(self._held.values()))
        self._held = {}

    def take(self, parameter: nn.Parameter | None) -> Tensor | None:
        """Return the sum that is held for a parameter, and hold it no longer."""
        return None if parameter is None else self._held.pop(parameter, None)

    def _holds(self, parameter: nn.Parameter) -> bool:
        return self._holds_all or bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)

    def _before(self, parameter: nn.Parameter) -> Tensor | None:
        return self._held.get(parameter) if self._holds(parameter) else parameter.grad


class WeightWork:
    """What an I leaves for its W: run once, it is empty."""

    def __init__(self) -> None:
        self._notes: list[Notes] = []

    def add(self, notes: Notes) -> None:
        """Keep one layer's notes."""
        self._notes.append(notes)

    @property
    def num_bytes(self) -> int:
        """Memory that the notes hold until W; a tensor that several notes share counts once."""
        storages = [t.untyped_storage() for notes in self._notes for t in (notes.x, notes.gradient)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def run(self) -> None:
        """Add the gradients to each parameter's `.grad`, and free each note as soon as it is used.

        A parameter's `register_post_accumulate_grad_hook` runs here, once, however many layers share it. A layer whose
        parameters have hooks of `register_hook` makes its weight gradients in I.
        """
        sums = Sums()
        self._notes.reverse()
        with torch.no_grad():
            while self._notes:
                notes = self._notes.pop()
                notes.rule.weight_gradients(notes, sums)
        sums.deliver()


class LinearRule:
    """y = x w^T + b: x's gradient is g w, w's is g^T x, b's the sum of g; complex x and w are conjugated in these."""

    def refuses(self, layer: nn.Linear) -> str | None:
        """Accept every Linear."""
        return None

    def input_gradient(self, layer: nn.Linear, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Multiply back.

        Shapes: gradient [..., O], weight [O, I] -> [..., I]
        """
        weight = weight.to(gradient.dtype)  # under autocast g has a smaller type than w
        return (gradient @ weight.conj()).to(x.dtype)

    def weight_gradients(self, notes: Notes, sums: Sums) -> None:
        """Multiply the layer's input with the gradient of its output: W of a linear layer."""
        layer, gradient = notes.layer, _rows(notes.gradient)  # [N, O]; of this rank: a parallel layer has more in all
        if layer.weight.requires_grad:
            x = _rows(notes.x).to(gradient.dtype)  # [N, I]
            sums.add_product(layer.weight, gradient.t(), x.conj())
        if layer.bias is not None and layer.bias.requires_grad:
            sums.add(layer.bias, gradient.sum(0))


class EmbeddingRule:
    """A row for each token: nothing goes back to tokens, and each row gets the gradients of its places."""

    def refuses(self, layer: nn.Embedding) -> str | None:
        """Refuse what changes its weight in forward, sparse gradients and complex numbers."""
        if layer.weight.is_complex():
            return "its weight is complex"
        if layer.max_norm is not None:
            return "max_norm changes the weight in forward"
        return "its gradient is sparse" if layer.sparse else None

    def input_gradient(self, layer: nn.Embedding, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Refuse: tokens are whole numbers and have no gradient."""
        raise AssertionError("tokens are whole numbers and have no gradient")

    def weight_gradients(self, notes: Notes, sums: Sums) -> None:
        """Add each place's gradient to its token's row."""
        layer = notes.layer
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        rows = torch.ops.aten.embedding_dense_backward(
            notes.gradient, notes.x, len(layer.weight), padding, layer.scale_grad_by_freq
        )
        sums.add(layer.weight, rows)


class ConvolutionRule:
    """A convolution, or a transposed one: torch's kernel is asked for one half of its gradients at a time."""

    def refuses(self, layer: Any) -> str | None:
        """Refuse padding that is computed outside of the kernel, and complex numbers: they are several kernels."""
        if layer.weight.is_complex():
            return "its weight is complex"
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return f"padding {layer.padding!r} of mode {layer.padding_mode!r} is made outside of the kernel"
        return None

    def input_gradient(self, layer: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Any:
        """Ask for the input's gradient alone."""
        return _convolution_backward(layer, x, weight, gradient, [True, False, False])[0].to(x.dtype)

    def weight_gradients(self, notes: Notes, sums: Sums) -> None:
        """Ask for the gradients of weight and bias."""
        layer = notes.layer
        wanted = [p is not None and p.requires_grad for p in (layer.weight, layer.bias)]
        found = _convolution_backward(layer, notes.x, layer.weight, notes.gradient, [False, *wanted])
        for parameter, gradient, is_wanted in zip((layer.weight, layer.bias), found[1:], wanted, strict=True):
            if is_wanted:
                sums.add(parameter, gradient)


RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LinearRule(),
    nn.Embedding: EmbeddingRule(),
    nn.Conv1d: ConvolutionRule(),
    nn.Conv2d: ConvolutionRule(),
    nn.Conv3d: ConvolutionRule(),
    nn.ConvTranspose1d: ConvolutionRule(),
    nn.ConvTranspose2d: ConvolutionRule(),
    nn.ConvTranspose3d: ConvolutionRule(),
}


def rule_of(layer: nn.Module) -> LayerRule | None:
    """Return the rule of a layer's exact type, or of its plain part.

    Its weight and bias must still be its own parameters: weight norm and pruning put what they compute in their place.
    """
    kind = layer.local_kind if isinstance(layer, LocalCompute) else type(layer)
    is_own = "weight" in layer._parameters and vars(layer).keys().isdisjoint(("weight", "bias"))
    return None if kind is None or not is_own else RULES.get(kind)


def place_of(layer: nn.Module) -> str:
    """Return the method of a layer that computes what its rule parts."""
    return "local_compute" if isinstance(layer, LocalCompute) else "forward"


def choose_layers(module: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Sort the modules that own parameters that want gradients.

    Returns:
        The layers that can wait, by name; and of the others the reason, by name.
    """
    layers: dict[str, nn.Module] = {}
    kept: dict[str, str] = {}
    compiled = tuple(f"{name}." for name, part in module.named_modules() if _is_compiled(part))
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        is_inside = "." in compiled or f"{name}.".startswith(compiled)  # "." is the module itself
        if own and (reason := "it is compiled" if is_inside else _reason(layer)):
            kept[name] = reason
        elif own:
            layers[name] = layer
    while shared := next(_shared(module, layers, kept), None):  # what one may not, those that share with it may not
        kept[shared[0]] = f"shares a parameter with {shared[1] or 'the module itself'}"
        del layers[shared[0]]
    return layers, kept


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made this module, or module.compile() was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _reason(layer: nn.Module) -> str | None:
    rule = rule_of(layer)
    if "forward" in vars(layer) or place_of(layer) in vars(layer):
        return "its forward was replaced"
    return f"{type(layer).__name__} has no rule" if rule is None else rule.refuses(layer)


def _shared(module: nn.Module, layers: dict[str, nn.Module], kept: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield layers that can wait and share a parameter with one that cannot, with that one's name."""
    owner = {p: name for name in kept for p in module.get_submodule(name).parameters(recurse=False)}
    for name, layer in layers.items():
        for parameter in layer.parameters(recurse=False):
            if parameter in owner:
                yield name, owner[parameter]


def _rows(tensor: Tensor) -> Tensor:
    """[..., H] -> [N, H], also for [H], and for tensors without elements."""
    return tensor[None].flatten(0, -2)


def _convolution_backward(layer: Any, x: Tensor, weight: Tensor, gradient: Tensor, wanted: list[bool]) -> Any:
    """Call torch's kernel; an input without a batch dimension gets one for the call."""
    alone = x.dim() == weight.dim() - 1
    if alone:
        x, gradient = x[None], gradient[None]
    found = torch.ops.aten.convolution_backward(
        gradient,
        x.to(gradient.dtype),
        weight.to(gradient.dtype),
        None if layer.bias is None else [layer.out_channels],
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
        wanted,
    )
    return (found[0][0], *found[1:]) if alone and found[0] is not None else found
