//! Speed over depth as a picture.

use super::report::{Line, Report};
use anyhow::bail;
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, Color, IntoDrawingArea, IntoFont, LineSeries, PathElement,
    RGBColor, SVGBackend, SeriesLabelPosition, WHITE,
};
use std::collections::BTreeMap;
use std::path::Path;

/// Width and height, in pixels.
const SIZE: (u32, u32) = (900, 540);
const COLOURS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
];

/// Draws the decode lines of `report`, one curve per number of sequences.
pub fn draw(report: &Report, path: &Path) -> anyhow::Result<()> {
    let mut curves: BTreeMap<usize, Vec<&Line>> = BTreeMap::new();
    for line in report.lines.iter().filter(|line| line.work == "decode") {
        curves.entry(line.n_sequences).or_default().push(line);
    }
    if curves.is_empty() {
        bail!("a picture of speed over depth needs decode lines (-n)");
    }
    for curve in curves.values_mut() {
        curve.sort_by_key(|line| line.depth);
    }
    let lines = || curves.values().flatten();
    let deepest = lines().map(|l| l.depth).max().unwrap_or(0).max(1) as f64;
    let fastest = lines().map(|l| l.fastest).fold(0.0, f64::max);

    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!("{}, {}", report.model, report.device);
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18).into_font())
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..deepest, 0.0..fastest * 1.1)?;
    chart
        .configure_mesh()
        .x_desc("depth, tokens")
        .y_desc("tokens/s")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()?;
    for (index, (n_sequences, curve)) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let points: Vec<(f64, f64)> = curve
            .iter()
            .map(|line| (line.depth as f64, line.tokens_per_second))
            .collect();
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                colour.stroke_width(2),
            ))?
            .label(match n_sequences {
                1 => "1 sequence".to_string(),
                n => format!("{n} sequences"),
            })
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        let dots = points.iter().map(|&p| Circle::new(p, 3, colour.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}
