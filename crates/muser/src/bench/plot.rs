//! Speed over depth as a picture: medians with their range, and the limit dashed.

use super::report::{Line, Report};
use crate::terminal::count;
use plotters::element::DashedPathElement;
use plotters::prelude::{
    BLACK, BindKeyPoints, ChartBuilder, Circle, Color, DashedLineSeries, IntoDrawingArea, IntoFont,
    LineSeries, PathElement, RGBColor, SVGBackend, SeriesLabelPosition, TRANSPARENT, WHITE,
};
use std::collections::BTreeMap;
use std::path::Path;

/// Width and height, in pixels.
const SIZE: (u32, u32) = (900, 540);
const GRID: RGBColor = RGBColor(228, 228, 228);
const COLOURS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
];
/// Limits beyond this multiple of the fastest speed would press the curves flat.
const HIGHEST_LIMIT: f64 = 2.5;
/// Height of a line of the legend, in pixels.
const LABEL_HEIGHT: f64 = 18.0;

/// Draws the decode lines of `report`, one curve per number of sequences. There is
/// at least one.
pub fn draw(report: &Report, path: &Path) -> anyhow::Result<()> {
    let curves = curves(report);
    let lines = || curves.values().flatten();
    let fastest = lines().map(|l| l.fastest).fold(0.0, f64::max);
    let limits: BTreeMap<usize, Vec<(i64, f64)>> = curves
        .iter()
        .map(|(&n_sequences, curve)| (n_sequences, limits(curve, HIGHEST_LIMIT * fastest)))
        .collect();
    let highest = limits.values().flatten().map(|at| at.1);
    let highest = highest.fold(fastest, f64::max);
    let is_limited = |limits: &&Vec<(i64, f64)>| !limits.is_empty();
    let n_labels = curves.len() + limits.values().filter(is_limited).count();
    // The legend has the upper edge for itself.
    let legend = n_labels as f64 * LABEL_HEIGHT + 2.0 * LABEL_HEIGHT;
    let top = highest / (1.0 - legend / f64::from(SIZE.1)).max(0.25);
    let mut depths: Vec<i64> = lines().map(|l| l.depth as i64).collect();
    depths.sort();
    let span = depths[depths.len() - 1] - depths[0];
    // Points and labels at the edges stay inside.
    let margin = (span / 25).max(1);
    let x_axis = depths[0] - margin..depths[depths.len() - 1] + margin;

    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title(report), ("sans-serif", 16).into_font())
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(x_axis.with_key_points(ticks(&depths, span / 12)), 0.0..top)?;
    let decimals = usize::from(highest < 10.0) + usize::from(highest < 1.0);
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .x_desc("depth, tokens")
        .y_desc("tokens/s")
        .y_label_formatter(&|y| format!("{y:.decimals$}"))
        .draw()?;
    for (index, (n_sequences, curve)) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let sequences = count(*n_sequences, "sequence");
        let point = |line: &&Line, y: f64| (line.depth as i64, y);
        let medians = curve.iter().map(|l| point(l, l.tokens_per_second));
        chart
            .draw_series(LineSeries::new(medians.clone(), colour.stroke_width(2)))?
            .label(sequences.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        chart.draw_series(medians.map(|at| Circle::new(at, 3, colour.filled())))?;
        let ranges = curve
            .iter()
            .map(|l| [point(l, l.slowest), point(l, l.fastest)]);
        chart.draw_series(ranges.map(|range| PathElement::new(range, colour)))?;
        let limits = &limits[n_sequences];
        if !limits.is_empty() {
            let thin = colour.stroke_width(1);
            chart
                .draw_series(DashedLineSeries::new(limits.iter().copied(), 6, 4, thin))?
                .label(format!("limit of {sequences}"))
                .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 16, y)], 4, 2, thin));
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}

/// The decode lines by number of sequences, each by depth.
fn curves(report: &Report) -> BTreeMap<usize, Vec<&Line>> {
    let mut curves: BTreeMap<usize, Vec<&Line>> = BTreeMap::new();
    for line in report.lines.iter().filter(|line| line.work == "decode") {
        curves.entry(line.n_sequences).or_default().push(line);
    }
    for curve in curves.values_mut() {
        curve.sort_by_key(|line| line.depth);
    }
    curves
}

/// The limits of a curve by depth, unless one of them is above `highest`: a part of
/// them would look like all.
fn limits(curve: &[&Line], highest: f64) -> Vec<(i64, f64)> {
    let limit = |line: &&Line| Some((line.depth as i64, line.limit_tokens_per_second?));
    let limits: Vec<(i64, f64)> = curve.iter().filter_map(limit).collect();
    match limits.iter().all(|at| at.1 <= highest) {
        true => limits,
        false => Vec::new(),
    }
}

fn title(report: &Report) -> String {
    let scope = &report.scope;
    let file = Path::new(&scope.model).file_name();
    let file = file.map_or(scope.model.clone().into(), |name| name.to_string_lossy());
    format!(
        "{file}, {}, {}, kv {}",
        scope.quantization, scope.device, scope.kv
    )
}

/// The measured depths, ascending, that are at least `distance` behind the tick before.
fn ticks(depths: &[i64], distance: i64) -> Vec<i64> {
    let mut ticks: Vec<i64> = Vec::new();
    for &depth in depths {
        let last = ticks.last();
        if last.is_none_or(|&last| depth > last && depth - last >= distance) {
            ticks.push(depth);
        }
    }
    ticks
}

#[cfg(test)]
mod tests {
    use super::ticks;

    #[test]
    fn ticks_are_measured_depths_with_room_for_their_labels() {
        let found = ticks(&[0, 0, 16, 512, 1024], 85);
        assert_eq!(found, [0, 512, 1024]);
        assert_eq!(ticks(&[7, 7], 0), [7]);
    }
}
