//! Results as a picture: bars for the table, curves for what was varied.

use std::io;
use std::ops::Range;
use std::path::Path;

use image::{ImageFormat, RgbImage};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::FontTransform;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::BenchError;
use crate::arguments::{Heads, Operation, Pass, Scaling};
use crate::report::{Report, Row};

const FONT: &str = "sans-serif";
/// Size of a panel, and of the heading above all panels, in pixels.
const PANEL: (u32, u32) = (680, 460);
const LINE_HEIGHT: u32 = 26;
const MOST_COLUMNS: usize = 3;

/// Distinguishable with any colour vision (Okabe and Ito, 2008), then darker ones.
const COLOURS: [RGBColor; 12] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(120, 120, 120),
    RGBColor(90, 30, 110),
    RGBColor(150, 60, 30),
    RGBColor(0, 70, 60),
    RGBColor(190, 190, 60),
    RGBColor(0, 0, 0),
];

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Draws the report and saves it as PNG.
///
/// # Errors
///
/// When there is nothing to draw, or the file cannot be written.
pub fn write(report: &Report, path: &Path) -> Result<(), BenchError> {
    let picture = draw(report)?;
    picture.save_with_format(path, ImageFormat::Png).map_err(|error| BenchError::Write {
        option: "--plot",
        path: path.to_owned(),
        source: io::Error::other(error),
    })
}

/// Draws the report: a panel for each operation, head layout and pass, then one for each curve.
///
/// # Errors
///
/// When there is nothing to draw.
pub fn draw(report: &Report) -> Result<RgbImage, BenchError> {
    let panels = panels(&report.rows);
    if panels.is_empty() {
        return Err(BenchError::Plot(
            "no row was measured, so there is nothing to draw".to_owned(),
        ));
    }
    let failed = |error: Box<dyn std::error::Error>| BenchError::Plot(error.to_string());
    plotters::style::register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| BenchError::Plot("the built-in font cannot be read".to_owned()))?;
    let series = distinct(report.rows.iter().map(series_name));
    let columns = panels.len().min(MOST_COLUMNS);
    let lines = panels.len().div_ceil(columns);
    let width = columns as u32 * PANEL.0;
    let legend_lines = series.len().div_ceil(legend_columns(width)) as u32;
    let heading = (2 + legend_lines) * LINE_HEIGHT;
    let height = heading + lines as u32 * PANEL.1;
    let mut pixels = vec![0_u8; (3 * width * height) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        let whole = || -> Drawn {
            root.fill(&WHITE)?;
            draw_heading(&root, report, &series, width)?;
            let (_, below) = root.split_vertically(heading);
            for (panel, area) in panels.iter().zip(below.split_evenly((lines, columns))) {
                panel.draw(&root, &area, &series)?;
            }
            root.present()?;
            Ok(())
        };
        whole().map_err(failed)?;
    }
    Ok(RgbImage::from_raw(width, height, pixels).expect("the buffer has three bytes a pixel"))
}

fn series_name(row: &Row) -> String {
    let device = if row.implementation.starts_with(&row.device) { "" } else { row.device.as_str() };
    format!("{} {device}", row.implementation).trim_end().to_owned()
}

fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

/// What one panel shows: rows that differ in layout and series alone.
#[derive(Clone, Copy, PartialEq)]
struct Kind {
    op: Operation,
    heads: Heads,
    pass: Pass,
    scaling: Option<Scaling>,
}

struct Panel<'a> {
    kind: Kind,
    rows: Vec<&'a Row>,
}

fn panels(rows: &[Row]) -> Vec<Panel<'_>> {
    let kind = |row: &Row| Kind {
        op: row.op,
        heads: row.head_layout(),
        pass: row.pass,
        scaling: row.scaling,
    };
    let panel = |wanted| {
        let rows = rows.iter().filter(|row| kind(row) == wanted).collect();
        Panel { kind: wanted, rows }
    };
    distinct(rows.iter().map(kind)).into_iter().map(panel).collect()
}

fn legend_columns(width: u32) -> usize {
    (width / 300).max(1) as usize
}

fn draw_heading(root: &Area<'_>, report: &Report, series: &[String], width: u32) -> Drawn {
    let machine = &report.machine;
    let dtype = report.rows.first().map_or_else(String::new, |row| format!(", {}", row.dtype));
    let title = format!(
        "Time of a call in ms, median, on a logarithmic scale; lower is better ({}{dtype})",
        machine.cpu
    );
    root.draw(&Text::new(title, (16, 12), (FONT, 22).into_font()))?;
    for (index, name) in series.iter().enumerate() {
        let columns = legend_columns(width);
        let (column, line) = ((index % columns) as i32, (index / columns) as i32);
        let (x, y) = (16 + 300 * column, (LINE_HEIGHT as i32) * (line + 2) - 8);
        let swatch = [(x, y), (x + 16, y + 16)];
        root.draw(&Rectangle::new(swatch, colour(index).filled()))?;
        root.draw(&Text::new(name.as_str(), (x + 24, y), (FONT, 17).into_font()))?;
    }
    Ok(())
}

fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()]
}

fn text(size: i32, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    TextStyle::from((FONT, size).into_font()).pos(Pos::new(horizontal, vertical))
}

impl Panel<'_> {
    fn title(&self) -> String {
        let Kind { op, heads, pass, scaling } = self.kind;
        let pass = if pass.has_backward() { format!(",{}", pass.suffix()) } else { String::new() };
        let scaling = scaling.map_or_else(String::new, |axis| format!(" against {axis}"));
        format!("{op} {heads}{scaling}{pass}")
    }

    /// Times from the shortest to the longest, with room for the numbers above.
    fn times(&self, room: f64) -> Range<f64> {
        let times = || self.rows.iter().map(|row| row.ms);
        let lowest = times().fold(f64::INFINITY, f64::min);
        let highest = times().fold(0.0, f64::max);
        let lowest = 10_f64.powf((lowest / 2.0).log10().floor());
        lowest..highest.max(10.0 * lowest) * room
    }

    fn draw(&self, root: &Area<'_>, area: &Area<'_>, series: &[String]) -> Drawn {
        match self.kind.scaling {
            None => self.draw_bars(root, area, series),
            Some(axis) => self.draw_curves(root, area, series, axis),
        }
    }

    fn draw_bars(&self, root: &Area<'_>, area: &Area<'_>, series: &[String]) -> Drawn {
        let layouts = distinct(self.rows.iter().map(|row| row.layout.as_str()));
        let own = distinct(self.rows.iter().map(|row| series_name(row)));
        let times = self.times(4.0);
        let base = times.start;
        let mut chart = ChartBuilder::on(area)
            .caption(self.title(), (FONT, 19))
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..layouts.len() as f64, times.log_scale())?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().x_labels(0).y_labels(8).y_label_formatter(&|ms| tick(*ms));
        mesh.y_label_style((FONT, 15)).light_line_style(RGBColor(238, 238, 238)).draw()?;
        let width = 0.84 / own.len() as f64;
        let rotated = text(14, HPos::Left, VPos::Center).transform(FontTransform::Rotate270);
        for row in &self.rows {
            let name = series_name(row);
            let index = series.iter().position(|known| *known == name).unwrap_or_default();
            let place = own.iter().position(|known| *known == name).unwrap_or_default() as f64;
            let layout = layouts.iter().position(|layout| *layout == row.layout);
            let left = layout.unwrap_or_default() as f64 + 0.08 + place * width;
            let bar = [(left, base), (left + 0.9 * width, row.ms)];
            chart.draw_series([Rectangle::new(bar, colour(index).filled())])?;
            let (x, y) = chart.backend_coord(&(left + 0.45 * width, row.ms));
            root.draw(&Text::new(number(row.ms), (x, y - 4), rotated.clone()))?;
        }
        for (index, layout) in layouts.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(index as f64 + 0.5, base));
            root.draw(&Text::new(*layout, (x, y + 8), text(16, HPos::Center, VPos::Top)))?;
        }
        Ok(())
    }

    fn draw_curves(
        &self,
        root: &Area<'_>,
        area: &Area<'_>,
        series: &[String],
        axis: Scaling,
    ) -> Drawn {
        let place = |row: &Row| match axis {
            Scaling::Tokens => row.tokens,
            Scaling::Segments => row.segments,
            Scaling::Threads => row.threads.unwrap_or(1),
        };
        let mut places = distinct(self.rows.iter().map(|row| place(row)));
        places.sort_unstable();
        let (first, last) = (places[0] as f64, places[places.len() - 1] as f64);
        let times = self.times(1.5);
        let base = times.start;
        let mut chart = ChartBuilder::on(area)
            .caption(self.title(), (FONT, 19))
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(64)
            .build_cartesian_2d((first / 1.3..last * 1.3).log_scale(), times.log_scale())?;
        let mut mesh = chart.configure_mesh();
        // The places are labelled below; a logarithmic axis labels its decades even if told not to.
        mesh.disable_x_mesh().x_label_formatter(&|_| String::new());
        mesh.y_labels(8).y_label_formatter(&|ms| tick(*ms));
        mesh.y_label_style((FONT, 15)).light_line_style(RGBColor(238, 238, 238)).draw()?;
        for name in distinct(self.rows.iter().map(|row| series_name(row))) {
            let index = series.iter().position(|known| *known == name).unwrap_or_default();
            let rows = self.rows.iter().filter(|row| series_name(row) == name);
            let points: Vec<_> = rows.map(|row| (place(row) as f64, row.ms)).collect();
            let style = colour(index).stroke_width(2);
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
            let dots = points.iter().map(|point| Circle::new(*point, 4, colour(index).filled()));
            chart.draw_series(dots)?;
        }
        for place in places {
            let (x, y) = chart.backend_coord(&(place as f64, base));
            let label = if place >= 1024 && place.is_multiple_of(1024) {
                format!("{}k", place / 1024)
            } else {
                place.to_string()
            };
            root.draw(&Text::new(label, (x, y + 8), text(16, HPos::Center, VPos::Top)))?;
        }
        Ok(())
    }
}

/// A power of ten, as far as the axis has one there.
fn tick(value: f64) -> String {
    let decimals = (-value.log10().floor()).max(0.0) as usize;
    format!("{value:.decimals$}")
}

/// Three figures, without an exponent.
fn number(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
#[path = "plot_tests.rs"]
mod tests;
