//! The forward pass of an attention layer: projection to q, k and v, norm and rotation of q and k,
//! attention inside each segment, projection back.
//!
//! Segments go through the layer a few at a time, and of a long segment some heads at a time, so that
//! what lies between the projections stays in a cache where it can, and takes no more memory than the
//! result.

use std::ops::Range;
use std::sync::Mutex;

use rayon::prelude::*;

use crate::attention_varlen::{self, Attention, AttentionOptions};
use crate::element::Element;
use crate::linear::{Linear, Packed, Part, project};
use crate::memory::Buffer;
use crate::rope_qk_norm::{NormRotation, RmsNorm, RotaryTables};
use crate::simd::InstructionSet;
use crate::view::{View, ViewMut};

/// What goes through the layer together.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Segments are gathered until they have so many tokens: the weights come from far away for each lot
    /// of them, which should be worth it.
    tokens: usize,
    /// Where q, k and v of some segments take more bytes, they are computed for so many heads at a time
    /// that they take a quarter of this.
    bytes: usize,
}

const LIMITS: Limits = Limits { tokens: 512, bytes: 128 << 20 };

/// A layer and its input.
#[derive(Clone, Copy, Debug)]
pub struct VisionAttention<'a, T> {
    /// Hidden states `[tokens, 1, width]`.
    pub x: View<'a, T>,
    /// Projection to q, then k, then v, head by head: `width` to `3 * heads * head_dim`.
    pub qkv: Linear<'a, T>,
    /// Projection of the heads' outputs: `heads * head_dim` to the outputs.
    pub proj: Linear<'a, T>,
    /// Number of heads.
    pub heads: usize,
    /// Norms of each head of q and of k.
    pub norms: Option<[RmsNorm<'a, T>; 2]>,
    /// The rotation of q and k.
    pub tables: Option<RotaryTables<'a>>,
    /// Where the segments begin and end (`cu_seqlens`): from 0 to `tokens`, never decreasing.
    pub offsets: &'a [i32],
    /// Scale, mask and softcap.
    pub options: AttentionOptions,
}

/// The layer's output `[tokens, 1, outputs]`, by the best instructions available
/// ([`InstructionSet::current`]).
///
/// # Panics
///
/// When the shapes or offsets do not fit together, or when there are tables and `head_dim` is odd.
pub fn forward<T: Element>(layer: &VisionAttention<'_, T>, out: ViewMut<'_, T>) {
    forward_with(InstructionSet::current(), layer, out);
}

/// [`forward`] by the instructions that the caller chooses.
///
/// # Panics
///
/// As for [`forward`], and when the machine does not have `set`.
pub fn forward_with<T: Element>(
    set: InstructionSet,
    layer: &VisionAttention<'_, T>,
    out: ViewMut<'_, T>,
) {
    forward_within(LIMITS, set, layer, out);
}

fn forward_within<T: Element>(
    limits: Limits,
    set: InstructionSet,
    layer: &VisionAttention<'_, T>,
    out: ViewMut<'_, T>,
) {
    let [tokens, _, _] = layer.x.shape();
    attention_varlen::expect_offsets("offsets", tokens, layer.offsets);
    let head_dim = layer.head_dim();
    let rotations = [0, 1].map(|index| {
        let norm = layer.norms.as_ref().map(|norms| &norms[index]);
        let shape = [tokens, layer.heads, head_dim];
        NormRotation::new(set, shape, norm, layer.tables.as_ref())
    });
    let changes = layer.norms.is_some() || layer.tables.is_some();
    let chunks = chunks(layer.offsets, limits.tokens);
    let longest = chunks.iter().map(|chunk| layer.tokens(chunk).len()).max().unwrap_or(0);
    let width = layer.heads * head_dim;
    let bytes = 3 * longest * width * size_of::<T>();
    let parts = if bytes <= limits.bytes { 1 } else { bytes.div_ceil((limits.bytes / 4).max(1)) };
    let parts = parts.min(layer.heads);
    let pass = Pass { set, layer, rotations: changes.then_some(rotations), longest };
    if parts == 1 {
        let proj = Packed::new(set, &layer.proj);
        let heads = Heads::new(&pass, 0..layer.heads);
        // Threads that work on segments of their own wait for each other at the very end alone.
        let idle = Mutex::new(Vec::new());
        chunks.par_iter().with_max_len(1).for_each(|chunk| {
            let buffers = idle.lock().expect("no thread panics while it holds the lock").pop();
            let (mut buffers, mut context) = buffers
                .unwrap_or_else(|| (heads.buffers(&pass), Buffer::<T>::new(longest * width)));
            let tokens = layer.tokens(chunk);
            let used = &mut context[..tokens.len() * width];
            heads.attend(&pass, chunk, &mut buffers, used, width);
            pass.project_back(used, &proj, &out, tokens);
            let mut idle = idle.lock().expect("no thread panics while it holds the lock");
            idle.push((buffers, context));
        });
        return;
    }
    let mut context = Buffer::<T>::new(tokens * width);
    for part in 0..parts {
        let cut = |part: usize| part * layer.heads / parts;
        let heads = Heads::new(&pass, cut(part)..cut(part + 1));
        let mut buffers = heads.buffers(&pass);
        for chunk in chunks.iter().filter(|chunk| !layer.tokens(chunk).is_empty()) {
            let start = layer.tokens(chunk).start * width + heads.heads.start * head_dim;
            heads.attend(&pass, chunk, &mut buffers, &mut context[start..], width);
        }
    }
    let proj = Packed::new(set, &layer.proj);
    pass.project_back(&context, &proj, &out, 0..tokens);
}

impl<T: Element> VisionAttention<'_, T> {
    fn head_dim(&self) -> usize {
        let [_, outputs] = self.qkv.shape();
        let parts = 3 * self.heads;
        assert!(
            parts > 0 && outputs > 0 && outputs.is_multiple_of(parts),
            "heads: expected a divisor of {outputs} / 3, got {}",
            self.heads
        );
        outputs / parts
    }

    /// The tokens of some segments.
    fn tokens(&self, segments: &Range<usize>) -> Range<usize> {
        self.offsets[segments.start] as usize..self.offsets[segments.end] as usize
    }
}

/// Neighbouring segments that go through the layer together.
fn chunks(offsets: &[i32], enough: usize) -> Vec<Range<usize>> {
    let mut chunks = Vec::new();
    let mut start = 0;
    for end in 1..offsets.len() {
        let tokens = (offsets[end] - offsets[start]) as usize;
        if tokens >= enough || end + 1 == offsets.len() {
            chunks.push(start..end);
            start = end;
        }
    }
    chunks
}

struct Pass<'a, T: Element> {
    set: InstructionSet,
    layer: &'a VisionAttention<'a, T>,
    /// Of q and of k.
    rotations: Option<[NormRotation<'a, T>; 2]>,
    /// Tokens of the longest chunk.
    longest: usize,
}

/// Some heads and their weights of q, k and v.
struct Heads<C> {
    heads: Range<usize>,
    head_dim: usize,
    weights: [Packed<C>; 3],
}

/// q, k, v and lse of a chunk.
struct Buffers<T> {
    qkv: [Buffer<T>; 3],
    lse: Vec<f32>,
}

impl<T: Element> Pass<'_, T> {
    fn project_back(
        &self,
        context: &[T],
        proj: &Packed<T::Compute>,
        out: &ViewMut<'_, T>,
        tokens: Range<usize>,
    ) {
        let [inputs, _] = self.layer.proj.shape();
        let context = View::contiguous(context, [tokens.len(), 1, inputs]);
        let part = Part { weight: proj, out: out.out.tokens(tokens), heads: None };
        project(self.set, &context, &[part]);
    }
}

impl<C: crate::element::Real> Heads<C> {
    fn new<T: Element<Compute = C>>(pass: &Pass<'_, T>, heads: Range<usize>) -> Self {
        let layer = pass.layer;
        let head_dim = layer.head_dim();
        let weights = [0, 1, 2].map(|index| {
            let [start, end] =
                [heads.start, heads.end].map(|head| (index * layer.heads + head) * head_dim);
            Packed::new(pass.set, &layer.qkv.columns(start..end))
        });
        Self { heads, head_dim, weights }
    }

    fn buffers<T: Element<Compute = C>>(&self, pass: &Pass<'_, T>) -> Buffers<T> {
        let rows = pass.longest * self.heads.len();
        let qkv = [(); 3].map(|()| Buffer::new(rows * self.head_dim));
        Buffers { qkv, lse: vec![0.0; rows] }
    }

    /// Attention of these heads inside the segments `chunk`, to rows that lie `stride` apart in `context`.
    fn attend<T: Element<Compute = C>>(
        &self,
        pass: &Pass<'_, T>,
        chunk: &Range<usize>,
        buffers: &mut Buffers<T>,
        context: &mut [T],
        stride: usize,
    ) {
        let Pass { set, layer, rotations, .. } = pass;
        let tokens = layer.tokens(chunk);
        let shape = [tokens.len(), self.heads.len(), self.head_dim];
        let len = shape.iter().product();
        let rotations = rotations
            .as_ref()
            .map(|rotations| rotations.each_ref().map(|rotation| rotation.tokens(tokens.clone())));
        let rotation = |index: usize| {
            let rotations = rotations.as_ref().filter(|_| index < 2)?;
            Some((self.head_dim, &rotations[index]))
        };
        let mut index = 0;
        let parts = buffers.qkv.each_mut().map(|part| {
            let rows = [tokens.len(), 1, self.heads.len() * self.head_dim];
            let out = ViewMut::contiguous(&mut part[..len], rows).out;
            let part = Part { weight: &self.weights[index], out, heads: rotation(index) };
            index += 1;
            part
        });
        project(*set, &layer.x.tokens(tokens.clone()), &parts);
        let offsets = &layer.offsets[chunk.start..=chunk.end];
        let offsets: Vec<_> = offsets.iter().map(|offset| offset - offsets[0]).collect();
        let [q, k, v] = buffers.qkv.each_ref().map(|part| View::contiguous(&part[..len], shape));
        let options = layer.options;
        let attention = Attention { q, k, v, offsets_q: &offsets, offsets_k: &offsets, options };
        let out = ViewMut::new(context, 0, shape, [stride, self.head_dim]);
        let lse = &mut buffers.lse[..tokens.len() * self.heads.len()];
        attention_varlen::forward_into(*set, &attention, out, lse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Real;
    use crate::linear;
    use crate::rope_qk_norm::{self, NormWeight};
    use half::bf16;
    use rstest::rstest;

    fn numbers<T: Element>(len: usize, seed: u32) -> Vec<T> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            T::narrow(Real::from_f64(f64::from(state >> 8) / f64::from(1 << 23) - 1.0))
        };
        (0..len).map(next).collect()
    }

    struct Weights<T> {
        qkv: Vec<T>,
        qkv_bias: Vec<T>,
        proj: Vec<T>,
        norms: [Vec<T>; 2],
        tables: [Vec<f32>; 2],
        heads: usize,
    }

    const WIDTH: usize = 96;

    impl<T: Element> Weights<T> {
        fn new(tokens: usize, heads: usize) -> Self {
            let head_dim = WIDTH / heads;
            let half = head_dim / 2;
            Self {
                qkv: numbers(WIDTH * 3 * WIDTH, 1),
                qkv_bias: numbers(3 * WIDTH, 2),
                proj: numbers(WIDTH * WIDTH, 3),
                norms: [numbers(head_dim, 4), numbers(head_dim, 5)],
                tables: [numbers(tokens * half, 6), numbers(tokens * half, 7)],
                heads,
            }
        }

        fn layer<'a>(
            &'a self,
            x: &'a [T],
            offsets: &'a [i32],
            plain: bool,
        ) -> VisionAttention<'a, T> {
            let norm =
                |weight: &'a Vec<T>| RmsNorm { weight: NormWeight::Input(weight), epsilon: 1e-5 };
            let [cos, sin] = &self.tables;
            VisionAttention {
                x: View::contiguous(x, [x.len() / WIDTH, 1, WIDTH]),
                qkv: Linear {
                    weight: View::contiguous(&self.qkv, [WIDTH, 1, 3 * WIDTH]),
                    bias: (!plain).then_some(&self.qkv_bias),
                },
                proj: Linear {
                    weight: View::contiguous(&self.proj, [WIDTH, 1, WIDTH]),
                    bias: None,
                },
                heads: self.heads,
                norms: (!plain).then(|| self.norms.each_ref().map(norm)),
                tables: (!plain).then_some(RotaryTables { cos, sin }),
                offsets,
                options: AttentionOptions::new(0.2),
            }
        }
    }

    /// The layer by one operation after another.
    fn separately<T: Element>(layer: &VisionAttention<'_, T>) -> Buffer<T> {
        let [tokens, _, _] = layer.x.shape();
        let mut qkv = Buffer::<T>::new(tokens * 3 * WIDTH);
        linear::forward(
            &layer.x,
            &layer.qkv,
            ViewMut::contiguous(&mut qkv, [tokens, 1, 3 * WIDTH]),
        );
        let (heads, head_dim) = (layer.heads, WIDTH / layer.heads);
        let shape = [tokens, heads, head_dim];
        let strides = [3 * WIDTH as isize, head_dim as isize, 1];
        let view = |part: usize| View::new(&qkv, part * WIDTH, shape, strides);
        let rotated = [0, 1].map(|index| {
            let norm = layer.norms.as_ref().map(|norms| &norms[index]);
            let mut rotated = Buffer::<T>::new(tokens * WIDTH);
            let out = ViewMut::contiguous(&mut rotated, shape);
            rope_qk_norm::forward(&view(index), norm, layer.tables.as_ref(), out);
            rotated
        });
        let [q, k] = rotated.each_ref().map(|rotated| View::contiguous(rotated, shape));
        let (offsets_q, offsets_k) = (layer.offsets, layer.offsets);
        let attention =
            Attention { q, k, v: view(2), offsets_q, offsets_k, options: layer.options };
        let (mut context, mut lse) = (Buffer::<T>::new(tokens * WIDTH), vec![0.0; tokens * heads]);
        attention_varlen::forward(&attention, &mut context, &mut lse);
        let mut out = Buffer::<T>::new(tokens * WIDTH);
        let context = View::contiguous(&context, [tokens, 1, WIDTH]);
        linear::forward(&context, &layer.proj, ViewMut::contiguous(&mut out, [tokens, 1, WIDTH]));
        out
    }

    fn check<T: Element + PartialEq>(limits: Limits, lengths: &[i32], heads: usize, plain: bool) {
        let mut offsets = vec![0];
        offsets.extend(lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        }));
        let tokens = lengths.iter().sum::<i32>() as usize;
        let (x, weights) = (numbers::<T>(tokens * WIDTH, 8), Weights::new(tokens, heads));
        let layer = weights.layer(&x, &offsets, plain);
        let mut out = Buffer::<T>::new(tokens * WIDTH);
        let view = ViewMut::contiguous(&mut out, [tokens, 1, WIDTH]);
        forward_within(limits, InstructionSet::current(), &layer, view);
        // Sums run over the same numbers in the same order.
        assert_eq!(*out, *separately(&layer));
    }

    #[rstest]
    fn pieces_give_what_the_whole_gives(
        #[values(&[50], &[50, 0], &[7, 0, 33, 1, 20], &[], &[0, 0])] lengths: &[i32],
        // All at once; a few segments at a time; some heads at a time; both.
        #[values((1000, usize::MAX), (16, usize::MAX), (1000, 0), (16, 0))] limits: (usize, usize),
        #[values(2, 4)] heads: usize,
        #[values(false, true)] plain: bool,
    ) {
        let limits = Limits { tokens: limits.0, bytes: limits.1 };
        check::<f32>(limits, lengths, heads, plain);
        check::<bf16>(limits, lengths, heads, plain);
    }

    #[test]
    #[should_panic(expected = "heads: expected a divisor of 288 / 3, got 5")]
    fn heads_that_do_not_share_out_the_width_panic() {
        let weights = Weights::<f32>::new(0, 4);
        let layer = VisionAttention { heads: 5, ..weights.layer(&[], &[0], true) };
        forward(&layer, ViewMut::contiguous(&mut [], [0, 1, WIDTH]));
    }
}
