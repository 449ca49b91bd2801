//! The attention loop.

use cubecl::{ir::ElemType, prelude::*};

use super::AttentionBlueprint;
use crate::{
    tile::{
        Band, MASKED,
        Streamed::{Keys, Values},
        TileAlgebra,
    },
    work_list::TILE_WORDS,
};

/// Which sides of the band are bounded, and whether scores are capped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ScoreOptions {
    pub bounded_left: bool,
    pub bounded_right: bool,
    pub softcap: bool,
}

impl ScoreOptions {
    /// The same with queries and keys swapped.
    pub(super) fn transposed(self) -> Self {
        Self { bounded_left: self.bounded_right, bounded_right: self.bounded_left, ..self }
    }
}

/// What all cubes of a launch have in common.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Scalars {
    /// Entries of the work list.
    pub tiles: u32,
    /// Heads of the rows.
    pub heads: u32,
    /// Query heads that share a key head.
    pub heads_per_kv: u32,
    /// `softmax_scale * log2(e)`, of either sign or none; `softmax_scale / softcap` where there is a cap.
    pub score_scale: f32,
    /// `softcap * log2(e)`, where there is one.
    pub softcap: f32,
    /// The window's sides, where they are bounded.
    pub left: i32,
    pub right: i32,
}

impl Scalars {
    /// For compiling a kernel without a device.
    pub fn compiled() -> ScalarsCompilationArg {
        ScalarsCompilationArg {
            tiles: (),
            heads: (),
            heads_per_kv: (),
            score_scale: (),
            softcap: (),
            left: (),
            right: (),
        }
    }
}

#[cube]
impl Scalars {
    /// What makes log2 of weights of scores that are compared: a cap leaves no more to do.
    pub fn weight_scale(&self, #[comptime] options: ScoreOptions) -> f32 {
        if comptime!(options.softcap) { f32::new(1.0f32) } else { self.score_scale }
    }
}

/// The query tile of one cube.
#[derive(CubeType)]
pub(super) struct WorkItem {
    pub q_start: usize,
    pub q_rows: i32,
    pub k_start: usize,
    pub band: Band,
}

/// Reads entry `tile` of the work list.
#[cube]
pub(super) fn work_item(
    work: &[i32],
    tile: u32,
    scalars: &Scalars,
    #[comptime] options: ScoreOptions,
) -> WorkItem {
    let item = tile as usize * TILE_WORDS;
    WorkItem {
        q_start: work[item] as usize,
        q_rows: work[item + 1],
        k_start: work[item + 2] as usize,
        band: Band {
            diagonal: work[item + 4],
            left: scalars.left,
            right: scalars.right,
            k_len: work[item + 3],
            bounded_left: comptime!(options.bounded_left),
            bounded_right: comptime!(options.bounded_right),
        },
    }
}

/// One cube per (query tile, head); see [`TileAlgebra`] for what the steps do.
///
/// Cubes are numbered with the tile running fastest, so that neighbours share keys and values.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention_varlen<T: TileAlgebra, F: Float, NQ: Size, NK: Size, NV: Size>(
    q: &Tensor<Vector<F, NQ>>,
    k: &Tensor<Vector<F, NK>>,
    v: &Tensor<Vector<F, NV>>,
    work: &[i32],
    out: &mut [Vector<F, Const<4>>],
    lse: &mut [f32],
    scalars: Scalars,
    query_factor: f32,
    minus_infinity: f32,
    #[comptime] blueprint: AttentionBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(NQ)] _vector_q: usize,
    #[define(NK)] _vector_k: usize,
    #[define(NV)] _vector_v: usize,
) {
    let shape = comptime!(blueprint.shape);
    let cube = CUBE_POS as u32;
    if cube >= scalars.tiles * scalars.heads {
        terminate!();
    }
    let head = (cube / scalars.tiles) as usize;
    let head_kv = head / scalars.heads_per_kv as usize;
    let item = work_item(work, cube % scalars.tiles, &scalars, blueprint.options);
    let band = item.band;
    let q_rows = item.q_rows;
    let scale = scalars.weight_scale(blueprint.options);

    let mut workspace = T::workspace(shape);
    let mut scores = T::scores(shape);
    let mut output = T::output(shape);
    let mut maximum = T::rows(f32::new(MASKED), shape);
    let mut sum = T::rows(f32::new(0.0f32), shape);
    let mut correction = T::rows(f32::new(0.0f32), shape);

    let q_origin = item.q_start * q.stride(0) + head * q.stride(1);
    T::load_query::<F, NQ>(&mut workspace, q, q_origin, q_rows as u32, query_factor, shape);

    let tile_k = comptime!(shape.k_rows as i32);
    let end = band.end_key(q_rows);
    let mut key = band.first_key();
    let (k_token, k_head) = (k.stride(0), head_kv * k.stride(1));
    let k_first = (item.k_start + key as usize) * k_token + k_head;
    T::fetch::<F, NK>(&mut workspace, k, k_first, band.keys_from(key, tile_k), Keys, shape);
    while key < end {
        let keys = band.keys_from(key, tile_k);
        let token = item.k_start + key as usize;

        T::stage::<F, NK>(&mut workspace, k, token * k_token + k_head, keys, Keys, shape);
        sync_cube();
        let v_origin = token * v.stride(0) + head_kv * v.stride(1);
        T::fetch::<F, NV>(&mut workspace, v, v_origin, keys, Values, shape);
        T::mma_ab_t(&mut workspace, &mut scores, shape);
        if comptime!(blueprint.options.softcap) {
            T::softcap(&mut scores, scalars.score_scale, scalars.softcap, shape);
        }
        if band.cuts(key, tile_k, q_rows) {
            T::mask(&mut scores, &band, key, shape);
        }
        T::row_max(&mut workspace, &scores, &mut maximum, &mut correction, scale, shape);
        T::exp2(&mut scores, &maximum, scale, shape);
        T::row_sum(&scores, &mut sum, &correction, shape);
        T::rescale(&mut output, &correction, shape);

        T::stage_weights(&mut workspace, &scores, shape);
        T::stage::<F, NV>(&mut workspace, v, v_origin, keys, Values, shape);
        sync_cube();
        key += tile_k;
        let next = (item.k_start + key as usize) * k_token + k_head;
        T::fetch::<F, NK>(&mut workspace, k, next, band.keys_from(key, tile_k), Keys, shape);
        T::mma_ab(&mut workspace, &mut output, shape);
    }

    T::store::<F>(
        &mut workspace,
        &output,
        &maximum,
        &sum,
        scale,
        out,
        lse,
        item.q_start * scalars.heads as usize + head,
        scalars.heads as usize,
        q_rows as u32,
        minus_infinity,
        shape,
    );
}
