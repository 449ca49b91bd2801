//! Attention against its definition in f64, on every instruction set of this machine.
#![allow(clippy::unwrap_used)]

mod common;

use common::attention::{Case, check};
use common::{Order, assert_close, instruction_sets};
use half::{bf16, f16};
use kernels_cpu::attention_varlen::{backward_with, forward, forward_with};
use kernels_cpu::{Attention, AttentionOptions, Gradients, View};
use proptest::prelude::*;
use rstest::rstest;

#[rstest]
fn every_head_dim(
    #[values(1, 7, 16, 40, 59, 64, 72, 80, 96, 128, 160, 192, 256)] head_dim: usize,
    #[values(false, true)] is_causal: bool,
) {
    let mut case = Case::new(&[(37, 37), (5, 50)], head_dim);
    case.options.is_causal = is_causal;
    check::<f32>(&case);
    check::<f64>(&case);
}

#[rstest]
fn every_type(#[values(Order::Contiguous, Order::Transposed)] order: Order) {
    let case = Case { order, ..Case::new(&[(40, 40), (0, 3), (9, 4)], 24) };
    check::<f32>(&case);
    check::<f64>(&case);
    check::<f16>(&case);
    check::<bf16>(&case);
}

#[rstest]
fn every_option(
    #[values(false, true)] is_causal: bool,
    #[values((None, None), (Some(3), Some(2)), (Some(0), None), (None, Some(0)), (Some(40), Some(40)))]
    window: (Option<usize>, Option<usize>),
    #[values(None, Some(0.5))] softcap: Option<f64>,
) {
    let mut case = Case::new(&[(70, 70), (3, 40), (40, 3)], 8);
    case.options = AttentionOptions { is_causal, window, softcap, ..case.options };
    case.d_lse = true;
    check::<f32>(&case);
    check::<f64>(&case);
}

#[rstest]
fn every_order(
    #[values(Order::Contiguous, Order::Gaps, Order::Transposed, Order::Flipped)] order: Order,
    #[values((4, 4), (4, 2), (4, 1))] (heads, kv_heads): (usize, usize),
) {
    let case = Case {
        heads,
        kv_heads,
        order,
        value_dim: 20,
        d_lse: true,
        ..Case::new(&[(33, 35), (1, 1), (17, 2)], 12)
    };
    check::<f32>(&case);
    check::<f16>(&case);
}

/// Several query and key tiles, more segments than threads, and one alone that threads share.
#[rstest]
#[case::one_long(vec![(300, 300)])]
#[case::many(vec![(64, 64); 9])]
#[case::mixed(vec![(1, 1), (290, 17), (0, 0), (17, 290), (0, 9), (9, 0), (130, 257)])]
fn every_mix_of_lengths(
    #[case] lengths: Vec<(usize, usize)>,
    #[values(false, true)] is_causal: bool,
    #[values(None, Some(100))] left: Option<usize>,
) {
    let mut case = Case { heads: 2, kv_heads: 1, ..Case::new(&lengths, 16) };
    case.options.is_causal = is_causal;
    case.options.window.0 = left;
    check::<f32>(&case);
}

/// One segment and key head is split over the threads; the output does not depend on their number.
#[rstest]
#[case::one_long(vec![(300, 290)])]
#[case::uneven(vec![(5, 5), (400, 400), (33, 70)])]
#[case::keys_alone(vec![(0, 700)])]
fn threads_share_a_long_segment(#[case] lengths: Vec<(usize, usize)>) {
    let mut case = Case { kv_heads: 1, ..Case::new(&lengths, 24) };
    case.options.is_causal = true;
    let data = case.data::<f32>();
    let expected = data.expected();
    for set in instruction_sets() {
        let outputs = [1, 4].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                data.check(set, &expected);
                let (out, lse) = data.forward(set);
                let gradients = data.backward(set, &out, &lse);
                assert_eq!(gradients, data.backward(set, &out, &lse), "{set:?}, again");
                (out, lse)
            })
        });
        assert_eq!(outputs[0], outputs[1], "{set:?}");
    }
}

#[test]
fn an_expanded_output_gradient_is_read_in_place() {
    let case = Case::new(&[(20, 20)], 8);
    let mut data = case.data::<f32>();
    let (out, lse) = data.forward(instruction_sets()[0]);
    data.d_out = common::Tensor::new([20, 2, 8], vec![0.25; 320], Order::Contiguous);
    let expected = data.expected();
    for set in instruction_sets() {
        let mut gradients = [const { Vec::new() }; 3].map(|_: Vec<f32>| vec![f32::NAN; 320]);
        let [q, k, v] = &mut gradients;
        let d_out = View::new(&[0.25], 0, [20, 2, 8], [0, 0, 0]);
        let output = kernels_cpu::OutputGradient { d_out, ..data.output(&out, &lse) };
        backward_with(set, &data.attention(), &output, Gradients::Separate { q, k, v });
        for (found, expected) in
            gradients.iter().zip([expected.d_q.clone(), expected.d_k.clone(), expected.d_v.clone()])
        {
            assert_close("gradient", found, &expected, 1e-5);
        }
    }
}

#[test]
fn packed_gradients_are_the_separate_ones() {
    let data = Case::new(&[(70, 70), (0, 0), (9, 9)], 12).data::<f32>();
    for set in instruction_sets() {
        let (out, lse) = data.forward(set);
        let separate = data.backward(set, &out, &lse);
        let mut packed = vec![f32::NAN; 79 * 3 * 24];
        let output = data.output(&out, &lse);
        backward_with(set, &data.attention(), &output, Gradients::Packed(&mut packed));
        for (token, row) in packed.chunks(3 * 24).enumerate() {
            for (part, separate) in row.chunks(24).zip(&separate) {
                assert_eq!(part, &separate[token * 24..][..24], "{set:?} token {token}");
            }
        }
    }
}

#[rstest]
fn rows_that_see_nothing_are_zero(#[values(false, true)] nan: bool) {
    let mut case = Case::new(&[(40, 4), (3, 0), (0, 5)], 8);
    case.options.is_causal = true;
    case.d_lse = true;
    let mut data = case.data::<f32>();
    if nan {
        // The gradient of a row that depends on nothing is nobody's business.
        data.d_lse.fill(f32::NAN);
    }
    for set in instruction_sets() {
        let (out, lse) = data.forward(set);
        let [q, k, v] = data.backward(set, &out, &lse);
        for row in (0..36 * 2).chain(80..86) {
            assert_eq!(lse[row], f32::NEG_INFINITY, "{set:?} {row}");
            assert!(out[row * 8..][..8].iter().chain(&q[row * 8..][..8]).all(|&x| x == 0.0));
        }
        for row in 8..18 {
            assert!(k[row * 8..][..8].iter().chain(&v[row * 8..][..8]).all(|&x| x == 0.0));
        }
    }
}

/// The same numbers, read where they lie and packed: an element's neighbour is elsewhere in the latter.
#[rstest]
fn where_keys_lie_decides_no_bit(
    #[values(8, 12, 20)] value_dim: usize,
    #[values((4, 4), (4, 1))] (heads, kv_heads): (usize, usize),
) {
    // 300 keys are several tiles: what the first has accumulated is read back.
    let lengths = [(31, 31), (3, 29), (0, 4), (33, 2), (9, 300)];
    let case = Case { heads, kv_heads, value_dim, ..Case::new(&lengths, 12) };
    let [rows, packed] = [Order::Contiguous, Order::Transposed]
        .map(|order| Case { order, ..case.clone() }.data::<f32>());
    for set in instruction_sets() {
        assert_eq!(rows.forward(set), packed.forward(set), "{set:?}");
    }
}

/// Every key is the same one, of stride 0.
#[test]
fn expanded_keys_are_read_in_place() {
    let mut case = Case::new(&[(9, 40)], 8);
    (case.heads, case.kv_heads) = (1, 1);
    let data = case.data::<f32>();
    let row: Vec<f32> = (0..8).map(|i| i as f32 / 4.0 - 1.0).collect();
    let keys = View::new(&row, 0, [40, 1, 8], [0, 8, 1]);
    let attention = Attention { k: keys, v: keys, ..data.attention() };
    for set in instruction_sets() {
        let (mut out, mut lse) = (vec![f32::NAN; 72], vec![f32::NAN; 9]);
        forward_with(set, &attention, &mut out, &mut lse);
        for found in out.chunks(8) {
            assert!(found.iter().zip(&row).all(|(x, y)| (x - y).abs() < 1e-6), "{set:?} {found:?}");
        }
    }
}

/// Queries that see no key give 0 also beside queries that see a NaN.
#[rstest]
fn blind_rows_are_zero_beside_nan(#[values(Order::Contiguous, Order::Transposed)] order: Order) {
    let case = Case { heads: 1, kv_heads: 1, order, ..Case::new(&[(40, 4)], 8) };
    let mut data = case.data::<f32>();
    data.v = common::Tensor::new([4, 1, 8], vec![f64::NAN; 32], order);
    let options = AttentionOptions { is_causal: true, ..data.attention().options };
    for set in instruction_sets() {
        let (mut out, mut lse) = (vec![f32::NAN; 320], vec![f32::NAN; 40]);
        forward_with(set, &Attention { options, ..data.attention() }, &mut out, &mut lse);
        assert!(out[..36 * 8].iter().all(|x| *x == 0.0), "{set:?} {out:?}");
        assert!(out[36 * 8..].iter().all(|x| x.is_nan()), "{set:?} {out:?}");
        assert!(lse[..36].iter().all(|x| *x == f32::NEG_INFINITY), "{set:?} {lse:?}");
    }
}

/// NaN in q, k or v of one segment makes exactly that segment's rows NaN.
#[rstest]
fn nan_stays_in_its_segment(
    #[values(0, 1, 2)] tensor: usize,
    // Read where they lie; packed; packed for several threads.
    #[values(20, 40, 200, 700)] length: usize,
    #[values(0, 19)] token: usize,
) {
    let case = Case { heads: 1, kv_heads: 1, ..Case::new(&[(length, length); 3], 8) };
    let mut data = case.data::<f32>();
    let tensors = [&mut data.q, &mut data.k, &mut data.v];
    let tensor_ref = tensors.into_iter().nth(tensor).unwrap();
    let mut values = tensor_ref.values.clone();
    values[(length + token) * 8..][..8].fill(f64::NAN);
    *tensor_ref = common::Tensor::new(tensor_ref.shape, values, Order::Contiguous);
    for set in instruction_sets() {
        let (out, lse) = data.forward(set);
        let [q, k, v] = data.backward(set, &out, &lse);
        for row in 0..3 * length {
            let own = (length..2 * length).contains(&row);
            let is_nan = own && (tensor > 0 || row == length + token);
            let parts = [&out[row * 8..][..8], &q[row * 8..][..8]].concat();
            assert!(parts.iter().all(|x| x.is_nan() == is_nan), "{set:?} row {row}: {parts:?}");
            let parts = [&k[row * 8..][..8], &v[row * 8..][..8]].concat();
            assert!(own || parts.iter().all(|x| x.is_finite()), "{set:?} row {row}: {parts:?}");
        }
    }
}

/// Scores far apart: the largest exponent decides, and nothing overflows.
#[test]
fn extreme_scores() {
    let mut case = Case::new(&[(40, 40)], 4);
    case.options.softmax_scale = 1e4;
    let data = case.data::<f64>();
    let expected = data.expected();
    for set in instruction_sets() {
        let (out, _) = data.forward(set);
        assert_close("out", &out, &expected.out, 1e-10);
    }
}

fn lengths() -> impl Strategy<Value = Vec<(usize, usize)>> {
    proptest::collection::vec((0usize..50, 0usize..50), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn packing_equals_separate_runs(lengths in lengths(), is_causal: bool) {
        let mut case = Case::new(&lengths, 8);
        case.options.is_causal = is_causal;
        let data = case.data::<f32>();
        for set in instruction_sets() {
            let (out, lse) = data.forward(set);
            let whole = data.attention();
            for (segment, &(queries, keys)) in lengths.iter().enumerate() {
                let [q, k] = [0, 1].map(|i| data.offsets[i][segment] as usize);
                let part = |tensor: &common::Tensor<f32>, start: usize, len: usize| {
                    tensor.values[start * 16..][..len * 16].iter().map(|&x| x as f32).collect::<Vec<_>>()
                };
                let (q_part, k_part, v_part) =
                    (part(&data.q, q, queries), part(&data.k, k, keys), part(&data.v, k, keys));
                let attention = Attention {
                    q: View::contiguous(&q_part, [queries, 2, 8]),
                    k: View::contiguous(&k_part, [keys, 2, 8]),
                    v: View::contiguous(&v_part, [keys, 2, 8]),
                    offsets_q: &[0, queries as i32],
                    offsets_k: &[0, keys as i32],
                    options: whole.options,
                };
                let (mut alone, mut alone_lse) = (vec![f32::NAN; queries * 16], vec![f32::NAN; queries * 2]);
                forward_with(set, &attention, &mut alone, &mut alone_lse);
                prop_assert_eq!(&alone, &out[q * 16..][..queries * 16]);
                prop_assert_eq!(&alone_lse, &lse[q * 2..][..queries * 2]);
            }
        }
    }

    #[test]
    fn weights_sum_to_one(lengths in lengths(), left in proptest::option::of(0usize..9)) {
        let mut case = Case::new(&lengths, 8);
        case.options.window = (left, Some(3));
        let mut data = case.data::<f32>();
        let ones = vec![1.0; data.v.values.len()];
        data.v = common::Tensor::new(data.v.shape, ones, Order::Contiguous);
        for set in instruction_sets() {
            let (out, lse) = data.forward(set);
            for (row, lse) in out.chunks(8).zip(lse) {
                let sum = if lse == f32::NEG_INFINITY { 0.0 } else { 1.0 };
                prop_assert!(row.iter().all(|x| (x - sum).abs() < 1e-5), "{:?}", row);
            }
        }
    }
}

#[rstest]
#[should_panic(expected = "offsets_q: expected offsets from 0 to the 4 tokens")]
fn offsets_past_the_tokens_panic() {
    let data = Case::new(&[(4, 4)], 8).data::<f32>();
    let attention = Attention { offsets_q: &[0, 5], ..data.attention() };
    forward(&attention, &mut [0.0; 64], &mut [0.0; 8]);
}

#[test]
#[should_panic(expected = "out: expected 64 elements, got 63")]
fn a_short_output_panics() {
    let data = Case::new(&[(4, 4)], 8).data::<f32>();
    forward(&data.attention(), &mut [0.0; 63], &mut [0.0; 8]);
}

#[test]
#[should_panic(expected = "k: expected the shape [4, 2, 8] by q and v")]
fn keys_of_another_head_dim_panic() {
    let data = Case::new(&[(4, 4)], 8).data::<f32>();
    let k = View::contiguous(&[0.0; 56], [4, 2, 7]);
    let attention = Attention { k, ..data.attention() };
    forward(&attention, &mut [0.0; 64], &mut [0.0; 8]);
}
