//! Pictures of what a tower saw: the features' first three principal components as colours.

use burn::tensor::{DType, Device, Tensor, TensorData};
use image::{Rgb, RgbImage, imageops};

/// The first three principal components of the rows of `features` (`[rows, dim]`), one colour a
/// row.
///
/// Each component is stretched from its 1st to its 99th percentile over 0..=255, and its sign is
/// chosen so that its largest loading is positive: the same features always give the same colours.
pub fn principal_colours(features: Tensor<2>) -> Vec<[u8; 3]> {
    let features = features.cast(DType::F32);
    let [rows, dim] = features.dims();
    let device = features.device();
    let centred = features.clone() - features.mean_dim(0);
    let covariance = centred.clone().transpose().matmul(centred.clone()) / rows as f32;

    let mut basis = start(dim);
    for _ in 0..64 {
        let moved = covariance.clone().matmul(matrix(&basis, dim, &device));
        basis = columns(moved);
        orthonormalise(&mut basis);
    }
    fix_signs(&mut basis);
    let components = columns(centred.matmul(matrix(&basis, dim, &device)));
    let channels = components.map(|component| stretch(&component));
    (0..rows).map(|row| channels.each_ref().map(|channel| channel[row])).collect()
}

/// Pixels between pictures.
const GAP: u32 = 8;
/// Longest side of a picture, in pixels, that common viewers show.
const LONGEST_SIDE: u32 = 16_384;

/// The sizes `(width, height)` to paint images in, so that [`stack`]ed pairs [`beside`] each other
/// can be shown: their own where that suffices, else all scaled by one factor.
pub fn fit(sizes: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let longest = f64::from(LONGEST_SIDE);
    let gap = f64::from(GAP);
    let width = sizes.iter().map(|size| 2.0 * f64::from(size.0)).fold(0.0, f64::max);
    let height: f64 = sizes.iter().map(|size| f64::from(size.1)).sum();
    let scale = ((longest - gap) / width).min((longest - gap * sizes.len() as f64) / height);
    if scale >= 1.0 {
        return sizes.to_vec();
    }
    let scaled = |side: u32| ((f64::from(side) * scale) as u32).max(1);
    sizes.iter().map(|&(width, height)| (scaled(width), scaled(height))).collect()
}

/// Paints one colour a patch over a picture as large as `image` and sets the two side by side.
///
/// # Panics
///
/// When there are not `grid_h * grid_w` colours, or the grid has no patch.
pub fn beside(image: &RgbImage, colours: &[[u8; 3]], grid_h: usize, grid_w: usize) -> RgbImage {
    assert_eq!(
        colours.len(),
        grid_h * grid_w,
        "colours: expected one for each of {grid_h} x {grid_w} patches"
    );
    let patches = RgbImage::from_fn(grid_w as u32, grid_h as u32, |x, y| {
        Rgb(colours[y as usize * grid_w + x as usize])
    });
    let (width, height) = image.dimensions();
    let patches = imageops::resize(&patches, width, height, imageops::FilterType::Nearest);
    let gap = GAP;
    let mut both = RgbImage::from_pixel(2 * width + gap, height, Rgb([255; 3]));
    imageops::replace(&mut both, image, 0, 0);
    imageops::replace(&mut both, &patches, i64::from(width + gap), 0);
    both
}

/// Sets pictures one below the other on white.
pub fn stack(pictures: &[RgbImage]) -> RgbImage {
    let gap = GAP;
    let width = pictures.iter().map(RgbImage::width).max().unwrap_or(1);
    let heights = pictures.iter().map(RgbImage::height);
    let height = heights.sum::<u32>() + gap * pictures.len().saturating_sub(1) as u32;
    let mut all = RgbImage::from_pixel(width, height.max(1), Rgb([255; 3]));
    let mut y = 0;
    for picture in pictures {
        imageops::replace(&mut all, picture, 0, y);
        y += i64::from(picture.height() + gap);
    }
    all
}

type Basis = [Vec<f32>; 3];

/// Three fixed directions that no structured feature is orthogonal to.
fn start(dim: usize) -> Basis {
    let direction = |seed: u32| {
        let mut state = seed;
        let next = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (*state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..dim).map(|_| next(&mut state)).collect()
    };
    let mut basis = [direction(1), direction(2), direction(3)];
    orthonormalise(&mut basis);
    basis
}

/// Gram and Schmidt; a direction whose share of the variance is rounding becomes zero.
fn orthonormalise(basis: &mut Basis) {
    const ROUNDING: f32 = 1e-5;
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let least = ROUNDING * dot(&basis[0], &basis[0]).sqrt();
    for index in 0..basis.len() {
        let (done, rest) = basis.split_at_mut(index);
        let column = &mut rest[0];
        for other in done.iter() {
            let share = dot(column, other);
            column.iter_mut().zip(other).for_each(|(value, other)| *value -= share * other);
        }
        let norm = dot(column, column).sqrt();
        let scale = if norm > least { 1.0 / norm } else { 0.0 };
        column.iter_mut().for_each(|value| *value *= scale);
    }
}

fn fix_signs(basis: &mut Basis) {
    for column in basis {
        let largest = column.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs()));
        if largest.is_some_and(|value| value < 0.0) {
            column.iter_mut().for_each(|value| *value = -*value);
        }
    }
}

fn matrix(basis: &Basis, dim: usize, device: &Device) -> Tensor<2> {
    let values = (0..dim).flat_map(|row| basis.each_ref().map(|column| column[row])).collect();
    Tensor::from_data(TensorData::new(values, [dim, 3]), (device, DType::F32))
}

fn columns(matrix: Tensor<2>) -> Basis {
    let values: Vec<f32> = matrix.into_data().iter::<f32>().collect();
    [0, 1, 2].map(|column| values.iter().skip(column).step_by(3).copied().collect())
}

fn stretch(values: &[f32]) -> Vec<u8> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f32::total_cmp);
    let percentile = |share: f32| sorted[((sorted.len() - 1) as f32 * share).round() as usize];
    let (low, high) = (percentile(0.01), percentile(0.99));
    let scale = if high > low { 255.0 / (high - low) } else { 0.0 };
    values.iter().map(|value| ((value - low) * scale).clamp(0.0, 255.0).round() as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_come_in_the_order_of_their_variance() {
        // Along the first axis the rows spread most, along the second less, along the third not.
        let rows: Vec<f32> =
            (0..64).flat_map(|i| [(i % 8) as f32 * 10.0, (i / 8) as f32, 5.0]).collect();
        let features = Tensor::from_data(TensorData::new(rows, [64, 3]), &Device::flex());
        let colours = principal_colours(features);
        assert_eq!(colours[0], [0, 0, 0]);
        assert_eq!(colours[7], [255, 0, 0]);
        assert_eq!(colours[56], [0, 255, 0]);
        assert_eq!(colours[63], [255, 255, 0]);
    }

    #[test]
    fn constant_features_are_one_colour() {
        let colours = principal_colours(Tensor::ones([5, 4], &Device::flex()));
        assert!(colours.iter().all(|colour| *colour == [0, 0, 0]));
    }

    #[test]
    fn many_pages_are_scaled_until_a_viewer_shows_them() {
        assert_eq!(fit(&[(1700, 2200), (20, 10)]), [(1700, 2200), (20, 10)]);
        let pages = fit(&[(1700, 2200); 200]);
        assert!(pages.iter().all(|&page| page == (57, 73)), "{:?}", pages[0]);
        assert_eq!(fit(&[(19_992, 560)]), [(8188, 229)]);
        // So many that only the gaps remain: a line each.
        assert!(fit(&[(28, 28); 3000]).iter().all(|&size| size == (1, 1)));
    }

    #[test]
    fn pictures_stand_beside_and_below_each_other() {
        let image = RgbImage::from_pixel(28, 14, Rgb([9; 3]));
        let both = beside(&image, &[[1, 2, 3], [4, 5, 6]], 1, 2);
        assert_eq!(both.dimensions(), (64, 14));
        assert_eq!(both.get_pixel(27, 13), &Rgb([9; 3]));
        assert_eq!(both.get_pixel(49, 0), &Rgb([1, 2, 3]));
        assert_eq!(both.get_pixel(50, 0), &Rgb([4, 5, 6]));
        assert_eq!(stack(&[both.clone(), both]).dimensions(), (64, 36));
    }
}
