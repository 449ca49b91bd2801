//! Loss and accuracy of a run, epoch by epoch, as a picture.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::{NumericEntry, store::Split};
use examples::output::OutputFile;
use image::{ImageFormat, RgbImage};
use plotters::prelude::*;

/// Width and height of the picture in pixels.
const SIZE: (u32, u32) = (1200, 480);

/// What Burn logged of a run: one value an epoch.
pub struct Curves {
    /// Epoch and mean loss, of training and validation.
    pub loss: [Vec<(usize, f64)>; 2],
    /// Epoch and percentage of digits that were told right, of training and validation.
    pub accuracy: [Vec<(usize, f64)>; 2],
}

impl Curves {
    /// Reads the logs of the epochs `1..=epochs` in the folder of a run; an epoch that was not
    /// completed has no value.
    pub fn read(run: &Path, epochs: usize) -> Self {
        let mut logger = FileMetricLogger::new(run);
        let mut curves = |metric: &str| {
            [Split::Train, Split::Valid].map(|split| {
                let last = |entries: Vec<NumericEntry>| {
                    entries.into_iter().find_map(|entry| match entry {
                        NumericEntry::Final(value) => Some(value),
                        _ => None,
                    })
                };
                let mut value =
                    |epoch| logger.read_numeric(metric, epoch, &split).ok().and_then(last);
                (1..=epochs).filter_map(|epoch| Some((epoch, value(epoch)?))).collect()
            })
        };
        Self { loss: curves("Loss"), accuracy: curves("Accuracy") }
    }

    /// Draws the picture.
    ///
    /// # Errors
    ///
    /// When drawing fails.
    pub fn draw(&self) -> Result<RgbImage, Box<dyn Error>> {
        plotters::style::register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular())
            .map_err(|_| "the font of the curves is damaged")?;
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        {
            let area = BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area();
            area.fill(&WHITE)?;
            let (left, right) = area.split_horizontally(SIZE.0 / 2);
            let highest = self.loss.iter().flatten().map(|(_, loss)| *loss).fold(0.1, f64::max);
            chart(&left, "loss", 0.0..1.05 * highest, &self.loss)?;
            chart(&right, "accuracy in %", 0.0..102.0, &self.accuracy)?;
            area.present()?;
        }
        RgbImage::from_raw(SIZE.0, SIZE.1, pixels).ok_or_else(|| "the picture is incomplete".into())
    }

    /// Draws the picture into `file`.
    ///
    /// # Errors
    ///
    /// When drawing or writing fails; then the file is as before.
    pub fn save(&self, file: &Path) -> Result<(), Box<dyn Error>> {
        save_png(&self.draw()?, file)
    }
}

/// Writes `image` to `file`, whole or not at all.
///
/// # Errors
///
/// When the file cannot be written.
pub fn save_png(image: &RgbImage, file: &Path) -> Result<(), Box<dyn Error>> {
    let mut png = std::io::Cursor::new(Vec::new());
    image.write_to(&mut png, ImageFormat::Png)?;
    let file = OutputFile::create(file)?;
    Ok(file.stage(|writer| writer.write_all(png.get_ref()))?.publish()?)
}

/// One panel: training in orange, validation in blue.
fn chart<B: DrawingBackend>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    caption: &str,
    range: Range<f64>,
    curves: &[Vec<(usize, f64)>; 2],
) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let last = curves.iter().flatten().map(|(epoch, _)| *epoch).max().unwrap_or(1);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 22))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(1..last.max(2), range)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("epoch")
        .label_style(("sans-serif", 15))
        .draw()?;
    let styles = [("training", RGBColor(214, 120, 30)), ("validation", RGBColor(30, 90, 180))];
    for (curve, (name, colour)) in curves.iter().zip(styles) {
        let line = LineSeries::new(curve.iter().copied(), colour.stroke_width(2));
        chart
            .draw_series(line)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
        // A run of one epoch is a point, which no line shows.
        let dots = curve.iter().map(|point| Circle::new(*point, 3, colour.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .label_font(("sans-serif", 15))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn both_panels_show_both_curves() {
        let falling = |from: f64| (1..=5).map(|epoch| (epoch, from / epoch as f64)).collect();
        let curves =
            Curves { loss: [falling(2.0), falling(3.0)], accuracy: [falling(90.0), falling(60.0)] };
        let picture = curves.draw().unwrap();
        for columns in [0..SIZE.0 / 2, SIZE.0 / 2..SIZE.0] {
            for colour in [[214, 120, 30], [30, 90, 180]] {
                let found = picture.enumerate_pixels();
                let found = found.filter(|(x, _, pixel)| columns.contains(x) && pixel.0 == colour);
                assert!(found.count() > 200, "{columns:?} {colour:?}");
            }
        }
        assert!(picture.pixels().any(|pixel| pixel.0 == [0; 3]), "text is black");
    }

    #[test]
    fn a_run_without_epochs_is_an_empty_picture() {
        let place = tempfile::tempdir().unwrap();
        let curves = Curves::read(place.path(), 3);
        assert!(curves.loss.iter().chain(&curves.accuracy).all(Vec::is_empty));
        assert_eq!(curves.draw().unwrap().dimensions(), SIZE);
    }
}
