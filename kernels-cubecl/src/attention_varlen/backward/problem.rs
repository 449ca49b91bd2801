//! What a caller asks of attention's gradients.

use super::super::AttentionProblem;
use crate::{TensorLayout, layout::VECTOR};

/// Bytes that separately placed gradients are aligned to: what WebGPU asks of a buffer's offset.
const ALIGNMENT: usize = 256;

/// Where a gradient `[tokens, heads, width]` lies in the gradient buffer, in elements. The last axis
/// is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// First element; a multiple of 4.
    pub offset: usize,
    /// Elements between tokens; a multiple of 4.
    pub token_stride: usize,
    /// Elements between heads; a multiple of 4.
    pub head_stride: usize,
}

impl Placement {
    /// The layout of a gradient of this shape, without the offset.
    pub fn layout(&self, shape: [usize; 3]) -> TensorLayout {
        TensorLayout { shape, strides: [self.token_stride, self.head_stride, 1] }
    }

    fn contiguous(offset: usize, [_, heads, width]: [usize; 3]) -> Self {
        Self { offset, token_stride: heads * width, head_stride: width }
    }

    /// One past the last element; 0 for a gradient without elements.
    fn end(&self, shape: [usize; 3]) -> usize {
        let layout = self.layout(shape);
        if layout.is_empty() { 0 } else { self.offset.saturating_add(layout.span()) }
    }

    fn check(&self, argument: &str, shape: [usize; 3]) {
        let Self { offset, token_stride, head_stride } = *self;
        let [tokens, heads, width] = shape;
        assert!(
            [offset, token_stride, head_stride].iter().all(|at| at.is_multiple_of(VECTOR)),
            "placements.{argument}: expected multiples of {VECTOR}, got {self:?}"
        );
        // Neighbours on the inner axis do not overlap, nor do whole rows of it on the outer one.
        let apart = |[outer, inner]: [(usize, usize); 2]| {
            let row = inner.0.saturating_sub(1).saturating_mul(inner.1).saturating_add(width);
            (inner.0 <= 1 || inner.1 >= width) && (outer.0 <= 1 || outer.1 >= row)
        };
        let (token, head) = ((tokens, token_stride), (heads, head_stride));
        assert!(
            apart([token, head]) || apart([head, token]),
            "placements.{argument}: elements of {shape:?} overlap at {self:?}"
        );
    }
}

/// Where the three gradients lie in one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradPlacements {
    /// Gradient of the queries, `[tokens_q, heads, head_dim]`.
    pub dq: Placement,
    /// Gradient of the keys, `[tokens_k, heads_kv, head_dim]`.
    pub dk: Placement,
    /// Gradient of the values, `[tokens_k, heads_kv, value_dim]`.
    pub dv: Placement,
}

impl GradPlacements {
    /// Three contiguous gradients one after the other, each starting at a multiple of 256 bytes.
    pub fn separate(problem: &AttentionProblem) -> Self {
        let alignment = ALIGNMENT / problem.dtype.size();
        let mut offset = 0;
        let [dq, dk, dv] = shapes(problem).map(|shape| {
            let placement = Placement::contiguous(offset, shape);
            offset += shape.iter().product::<usize>().next_multiple_of(alignment);
            placement
        });
        Self { dq, dk, dv }
    }

    /// The gradient of a packed projection `[tokens, 3, heads, head_dim]`.
    ///
    /// # Panics
    ///
    /// If q, k and v differ in shape.
    pub fn packed(problem: &AttentionProblem) -> Self {
        let shape @ [_, heads, head_dim] = problem.q.shape;
        assert_eq!(problem.k.shape, shape, "k: must have the shape of q to be packed with it");
        assert_eq!(problem.v.shape, shape, "v: must have the shape of q to be packed with it");
        let row = heads * head_dim;
        let [dq, dk, dv] = [0, 1, 2].map(|i| Placement {
            offset: i * row,
            token_stride: 3 * row,
            head_stride: head_dim,
        });
        Self { dq, dk, dv }
    }

    /// Elements that the gradient buffer needs.
    pub fn len(&self, problem: &AttentionProblem) -> usize {
        self.each(problem)
            .map(|(_, placement, shape)| placement.end(shape))
            .into_iter()
            .max()
            .unwrap_or(0)
    }

    fn each(&self, problem: &AttentionProblem) -> [(&'static str, Placement, [usize; 3]); 3] {
        let [q, k, v] = shapes(problem);
        [("dq", self.dq, q), ("dk", self.dk, k), ("dv", self.dv, v)]
    }
}

fn shapes(problem: &AttentionProblem) -> [[usize; 3]; 3] {
    [problem.q.shape, problem.k.shape, problem.v.shape]
}

/// The gradients of one attention call, independent of any device.
///
/// As for the forward pass, segments come as work lists, here one over queries and one over keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionGradProblem {
    /// The attention call.
    pub forward: AttentionProblem,
    /// Its output `[tokens_q, heads, value_dim]`.
    pub out: TensorLayout,
    /// The gradient of the output, of its shape and element type. Expanded tensors (stride 0) are
    /// read in place.
    pub d_out: TensorLayout,
    /// Strides of the gradient of lse, f32 `[tokens_q, heads]`; `None` if there is none.
    pub d_lse: Option<[usize; 2]>,
    /// Where the gradients of q, k and v go. No element may belong to two of them.
    pub placements: GradPlacements,
}

impl AttentionGradProblem {
    /// Gradients of `forward`, placed one after the other, with contiguous `out` and `d_out` and no
    /// gradient of lse.
    pub fn new(forward: AttentionProblem) -> Self {
        let out = TensorLayout::contiguous(forward.out_shape());
        let placements = GradPlacements::separate(&forward);
        Self { forward, out, d_out: out, d_lse: None, placements }
    }

    /// Shape of the statistics, `[tokens_q, heads, 2]`, f32.
    pub fn stats_shape(&self) -> [usize; 3] {
        let [tokens, heads] = self.forward.lse_shape();
        [tokens, heads, 2]
    }

    /// Elements that the gradient buffer needs.
    pub fn grads_len(&self) -> usize {
        self.placements.len(&self.forward)
    }

    /// The gradient of lse as a rank-3 tensor with one element per head.
    pub(super) fn d_lse_layout(&self) -> Option<TensorLayout> {
        let [tokens, heads] = self.forward.lse_shape();
        self.d_lse.map(|[token, head]| TensorLayout {
            shape: [tokens, heads, 1],
            strides: [token, head, 1],
        })
    }

    /// Every tensor, for choosing offsets.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorLayout)> {
        let forward = &self.forward;
        let tensors = [
            ("q", forward.q),
            ("k", forward.k),
            ("v", forward.v),
            ("out", self.out),
            ("d_out", self.d_out),
            ("stats", TensorLayout::contiguous(self.stats_shape())),
            ("grads", TensorLayout::contiguous([1, 1, self.grads_len()])),
        ];
        tensors.into_iter().chain(self.d_lse_layout().map(|layout| ("d_lse", layout)))
    }

    /// # Panics
    ///
    /// If shapes do not fit together, softcap is not positive, or elements of a gradient overlap.
    pub(super) fn check(&self) {
        self.forward.check();
        let shape = self.forward.out_shape();
        assert_eq!(self.out.shape, shape, "out: shape differs from the attention's");
        assert_eq!(self.d_out.shape, shape, "d_out: shape differs from the attention's");
        for (argument, placement, shape) in self.placements.each(&self.forward) {
            placement.check(argument, shape);
        }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::ir::{ElemType, FloatKind};

    use super::*;

    fn problem(tokens_k: usize, heads_kv: usize, value_dim: usize) -> AttentionProblem {
        AttentionProblem::new(
            TensorLayout::contiguous([5, 4, 24]),
            TensorLayout::contiguous([tokens_k, heads_kv, 24]),
            TensorLayout::contiguous([tokens_k, heads_kv, value_dim]),
            ElemType::Float(FloatKind::F16),
        )
    }

    #[test]
    fn separate_gradients_are_aligned_and_end_with_the_last() {
        let problem = problem(3, 2, 40);
        let placements = GradPlacements::separate(&problem);
        // 480, 144 and 240 elements of 2 bytes.
        assert_eq!([placements.dq, placements.dk, placements.dv].map(|p| p.offset), [0, 512, 768]);
        assert_eq!(placements.dv.token_stride, 80);
        assert_eq!(placements.len(&problem), 768 + 240);
        AttentionGradProblem::new(problem).check();
    }

    #[test]
    fn packed_gradients_interleave() {
        let problem = problem(5, 4, 24);
        let placements = GradPlacements::packed(&problem);
        let expected = Placement { offset: 192, token_stride: 288, head_stride: 24 };
        assert_eq!(placements.dv, expected);
        assert_eq!(placements.len(&problem), 5 * 288);
        AttentionGradProblem { placements, ..AttentionGradProblem::new(problem) }.check();
    }

    #[test]
    fn gradients_without_elements_take_no_room() {
        let problem = problem(0, 4, 24);
        assert_eq!(GradPlacements::separate(&problem).len(&problem), 480);
    }

    #[test]
    #[should_panic(expected = "placements.dk: elements of [5, 4, 24] overlap")]
    fn overlapping_elements_are_refused() {
        let mut problem = AttentionGradProblem::new(problem(5, 4, 24));
        problem.placements.dk.token_stride = 92;
        problem.check();
    }

    #[test]
    #[should_panic(expected = "placements.dq: expected multiples of 4")]
    fn odd_placements_are_refused() {
        let mut problem = AttentionGradProblem::new(problem(5, 4, 24));
        problem.placements.dq.offset = 2;
        problem.check();
    }
}
