"""The heads of an attention module: how wide one is, how many each layer makes, and how many are left on a rank.

A module that views its queries by a number of heads keeps that number as an attribute. After the cut there are fewer,
so the attribute becomes this rank's number. A module whose forward uses a constant cannot be made to; it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from distlab.tensor_parallel.linear import linear_sizes

HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
SHARED = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads")
SIZES = ("head_dim", "head_size", "attention_head_size")
WIDTHS = ("split_size", "n_embd", "embed_dim", "attn_dim", "all_head_size", "inner_dim")


class AttentionHeads:
    """The heads of one attention module, before the cut.

    Args:
        name: the module's.
        module: it holds the layers.
        layers: its layers of style "heads", "fused" or "interleaved", by name.
        num_ranks: that share the heads.
        more_counts: other attributes that hold numbers of heads.
        fused: how query, key and value lie in one layer: "fused" or "interleaved"; "" where each has its own.

    Attributes:
        size: features per head.
        sections: of each layer, the lengths along its output that are cut apart.

    Raises:
        ValueError: the size of a head cannot be found, or the ranks do not divide the heads.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        layers: dict[str, nn.Module],
        num_ranks: int,
        more_counts: Sequence[str] = (),
        *,
        fused: str = "",
    ) -> None:
        self._name, self._module, self._num_ranks = name, module, num_ranks
        self._counts = (*HEADS, *SHARED, *more_counts)
        outputs = {own: linear_sizes(layer)[1] for own, layer in layers.items()}
        heads, shared, size = (self._first(names) for names in ((*HEADS, *more_counts), SHARED, SIZES))
        if heads is None and size is None:
            raise ValueError(
                f"{name} holds the layers of heads {', '.join(layers)}, but no attribute with their number or size "
                f"({', '.join((*HEADS, *SIZES))}); give it one that its forward uses, and name it in head_counts="
            )
        has_size = size is not None
        if size is None and heads is not None:
            size = max(outputs.values()) // (heads + 2 * (shared or heads) if fused else heads)
        self.size = max(size or 0, 1)
        self.sections = {}
        for own, features in outputs.items():
            whole = features // self.size
            counts = [whole]
            if fused:
                both = shared or ((whole - heads) // 2 if heads is not None and has_size else whole // 3)
                counts = [heads or whole - 2 * both, both, both]
            self._check(own, features, counts)
            self.sections[own] = tuple(count * self.size for count in counts)
        self._width = max(lengths[0] for lengths in self.sections.values())
        if fused == "interleaved":  # queries with the key and value that they share lie side by side: one piece
            self.sections = {own: (sum(lengths),) for own, lengths in self.sections.items()}

    def make_local(self) -> None:
        """Let the module count this rank's heads, and the features of these."""
        for name, value in list(vars(self._module).items()):
            if type(value) is int and (name in self._counts or (name in WIDTHS and value == self._width)):
                setattr(self._module, name, value // self._num_ranks)

    def _first(self, names: Sequence[str]) -> int | None:
        values = (vars(self._module).get(name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    def _check(self, own: str, features: int, counts: list[int]) -> None:
        where = f"{self._name}.{own}" if self._name else own
        if min(counts) < 1 or sum(counts) * self.size != features:
            raise ValueError(
                f"{where} has {features} output features, which are not {counts} heads of {self.size}; check the "
                "module's numbers of heads, and the style: 'fused' or 'interleaved' for query, key and value in one "
                "layer, else 'heads'"
            )
        for count in counts:
            if count % self._num_ranks:
                raise ValueError(
                    f"{where} makes {count} heads of {self.size} features, which {self._num_ranks} ranks do not "
                    f"divide; use a number of ranks that divides {count}, or leave this attention whole: take all its "
                    "layers out of the plan"
                )
