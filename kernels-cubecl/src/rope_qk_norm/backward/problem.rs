//! What a caller asks of the gradient of the fused norm and rotation.

use cubecl::ir::ElemType;

use crate::{TensorLayout, rope_qk_norm::RmsNorm};

/// One call, independent of any device.
///
/// A call works on one tensor of heads, or on queries and keys that lie in one packed tensor. Its
/// tensors all have the shape `[tokens, groups, heads, head_dim]`: group 0 are queries (or the one
/// tensor), group 1 are keys. Of a packed projection `[tokens, 3, heads, head_dim]` the values are
/// left out, and stay as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeQkNormBackwardProblem {
    /// Tokens of the batch.
    pub tokens: usize,
    /// Heads of group 0.
    pub heads: usize,
    /// Heads of group 1; `None` if there is but one group.
    pub heads_kv: Option<usize>,
    /// Elements per head.
    pub head_dim: usize,
    /// Element type of the input and of the gradients: f32, f16 or bf16. Arithmetic is always f32.
    pub dtype: ElemType,
    /// The norm of the forward pass.
    pub norm: Option<RmsNorm>,
    /// Element strides of the f32 cos and sin tables `[tokens, head_dim / 2]`; `None` if the forward
    /// pass had no rotation.
    pub rotary: Option<[[usize; 2]; 2]>,
    /// Element strides of the input before the norm. Meaningless without norm.
    pub x: [usize; 4],
    /// Element strides of the gradient of the output, 0 where it is expanded; `None` if it is what
    /// `dx` holds on entry, to be replaced in place.
    pub d_out: Option<[usize; 4]>,
    /// Element strides of the gradient of the input.
    pub dx: [usize; 4],
}

impl RopeQkNormBackwardProblem {
    /// One tensor `[tokens, heads, head_dim]`, of any strides, whose gradient is written to a
    /// contiguous tensor; with a rotation by contiguous tables and without norm.
    ///
    /// # Panics
    ///
    /// If the shapes of `x` and `d_out` differ.
    pub fn single(x: TensorLayout, d_out: TensorLayout, dtype: ElemType) -> Self {
        assert_eq!(d_out.shape, x.shape, "d_out: expected the shape of x");
        let strides = |[token, head, element]: [usize; 3]| [token, 0, head, element];
        let [tokens, heads, head_dim] = x.shape;
        Self {
            tokens,
            heads,
            heads_kv: None,
            head_dim,
            dtype,
            norm: None,
            rotary: Some([[head_dim / 2, 1]; 2]),
            x: strides(x.strides),
            d_out: Some(strides(d_out.strides)),
            dx: strides(TensorLayout::contiguous(x.shape).strides),
        }
    }

    /// Queries and keys in slots 0 and 1 of a packed projection `[tokens, slots, heads, head_dim]`
    /// with strides `x`, whose gradient replaces that of the output in slots 0 and 1 of a tensor of
    /// the same shape with strides `dx`; with a rotation by contiguous tables and without norm.
    pub fn packed(
        [tokens, heads, head_dim]: [usize; 3],
        x: [usize; 4],
        dx: [usize; 4],
        dtype: ElemType,
    ) -> Self {
        Self {
            tokens,
            heads,
            heads_kv: Some(heads),
            head_dim,
            dtype,
            norm: None,
            rotary: Some([[head_dim / 2, 1]; 2]),
            x,
            d_out: None,
            dx,
        }
    }

    /// Groups of heads: 1 or 2.
    pub fn groups(&self) -> usize {
        1 + usize::from(self.heads_kv.is_some())
    }

    /// # Panics
    ///
    /// If there is nothing to do, or if a stride of `dx` is 0.
    pub(super) fn check(&self) {
        assert!(
            self.norm.is_some() || self.rotary.is_some(),
            "norm, rotary: expected at least one, got neither"
        );
        let shape = [self.tokens, self.groups(), self.heads, self.head_dim];
        let distinct = (0..4).all(|axis| shape[axis] <= 1 || self.dx[axis] > 0);
        assert!(distinct, "dx: expected strides above 0, got {:?}", self.dx);
    }

    /// Offset and layout of each group in a tensor of the call.
    pub(super) fn groups_of(
        &self,
        [token, group, head, element]: [usize; 4],
    ) -> impl Iterator<Item = (usize, TensorLayout)> {
        let heads = [Some(self.heads), self.heads_kv];
        let (tokens, head_dim) = (self.tokens, self.head_dim);
        heads.into_iter().flatten().enumerate().map(move |(index, heads)| {
            let layout =
                TensorLayout { shape: [tokens, heads, head_dim], strides: [token, head, element] };
            (index.saturating_mul(group), layout)
        })
    }

    /// Elements from the first to the last one addressed in a tensor of the call, both included.
    pub(super) fn span(&self, strides: [usize; 4]) -> usize {
        let ends = self.groups_of(strides).filter(|(_, layout)| !layout.is_empty());
        ends.map(|(offset, layout)| offset.saturating_add(layout.span())).max().unwrap_or(0)
    }
}
