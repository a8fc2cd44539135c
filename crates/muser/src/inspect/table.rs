//! Tables of tensors, for people.
//!
//! What a reader would get wrong: texts come from the file, so control
//! characters are escaped here, in every cell, and names are shortened too.

use super::sizes::Sizes;
use crate::terminal::{BOLD, count, grouped, one_line};
use gguf::{TensorInfo, TensorType, shown};
use std::io::{self, Write};

/// To which side a column is flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Keys and names beyond this do not widen their column.
const MOST_COLUMN_CHARS: usize = 48;

/// Writes rows in columns that are as wide as their longest cell. No cell
/// steers a terminal.
pub fn write_rows<const N: usize>(
    out: &mut impl Write,
    align: &[Align; N],
    rows: &[[String; N]],
) -> io::Result<()> {
    let escaped = |row: &[String; N]| std::array::from_fn(|i| one_line(&row[i]).into_owned());
    let rows: Vec<[String; N]> = rows.iter().map(escaped).collect();
    let width = |column: usize| {
        let chars = rows.iter().map(|row| row[column].chars().count());
        chars.max().unwrap_or(0).min(MOST_COLUMN_CHARS)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            line.push_str("  ");
            line.push_str(&match align[column] {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// `256 x 4096`.
fn shape_text(shape: &[u64]) -> String {
    let lengths: Vec<String> = shape.iter().map(u64::to_string).collect();
    lengths.join(" x ")
}

fn data_bytes(tensor: &TensorInfo) -> u64 {
    tensor.data_bytes().expect("a shape that was checked")
}

/// Writes a line for each tensor.
pub fn write_tensors(out: &mut impl Write, tensors: &[TensorInfo]) -> io::Result<()> {
    let row = |tensor: &TensorInfo| {
        [
            shown(&tensor.name),
            tensor.ty.to_string(),
            shape_text(&tensor.shape),
            grouped(data_bytes(tensor)),
        ]
    };
    let rows: Vec<[String; 4]> = tensors.iter().map(row).collect();
    write_rows(
        out,
        &[Align::Left, Align::Left, Align::Left, Align::Right],
        &rows,
    )
}

/// Tensors that differ in their layer only.
struct Group {
    pattern: String,
    ty: TensorType,
    shape: Vec<u64>,
    layers: Vec<u64>,
    n_tensors: u64,
    n_bytes: u64,
}

/// The name with `N` for its first number between dots, and that number.
fn pattern(name: &str) -> (String, Option<u64>) {
    let mut layer = None;
    let part = |part: &str| match (layer, part.parse()) {
        (None, Ok(n)) => {
            layer = Some(n);
            "N".to_string()
        }
        _ => part.to_string(),
    };
    let parts: Vec<String> = name.split('.').map(part).collect();
    (shown(&parts.join(".")), layer)
}

/// `0-5, 8, 11`.
fn ranges_text(numbers: &[u64]) -> String {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for n in numbers {
        match ranges.last_mut() {
            Some((_, end)) if n == *end + 1 => *end = n,
            _ => ranges.push((n, n)),
        }
    }
    let text = |&(start, end): &(u64, u64)| match start == end {
        true => start.to_string(),
        false => format!("{start}-{end}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(", ")
}

fn groups(tensors: &[TensorInfo]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for tensor in tensors {
        let (pattern, layer) = pattern(&tensor.name);
        let same = |g: &Group| {
            layer.is_some() && g.pattern == pattern && g.ty == tensor.ty && g.shape == tensor.shape
        };
        let index = match groups.iter().position(same) {
            Some(index) => index,
            None => {
                // Beside the tensors of the same name in other layers.
                let last = groups
                    .iter()
                    .rposition(|g| layer.is_some() && g.pattern == pattern);
                let index = last.map_or(groups.len(), |last| last + 1);
                let group = Group {
                    pattern,
                    ty: tensor.ty,
                    shape: tensor.shape.clone(),
                    layers: Vec::new(),
                    n_tensors: 0,
                    n_bytes: 0,
                };
                groups.insert(index, group);
                index
            }
        };
        let group = &mut groups[index];
        group.layers.extend(layer);
        group.n_tensors += 1;
        group.n_bytes += data_bytes(tensor);
    }
    groups
}

/// Writes a line for all tensors that differ in their layer only.
pub fn write_tensor_groups(out: &mut impl Write, tensors: &[TensorInfo]) -> io::Result<()> {
    let head = ["name", "type", "shape", "count", "bytes", "layers"].map(str::to_string);
    let row = |group: &Group| {
        [
            group.pattern.clone(),
            group.ty.to_string(),
            shape_text(&group.shape),
            group.n_tensors.to_string(),
            grouped(group.n_bytes),
            ranges_text(&group.layers),
        ]
    };
    let mut rows = vec![head];
    rows.extend(groups(tensors).iter().map(row));
    use Align::{Left, Right};
    write_rows(out, &[Left, Left, Left, Right, Right, Left], &rows)
}

/// Writes the sums by encoding, and the total.
pub fn write_sizes(out: &mut impl Write, sizes: &Sizes) -> io::Result<()> {
    writeln!(out, "{BOLD}Sizes{BOLD:#}")?;
    let row = |name: String, n_tensors: u64, n_parameters: u64, n_bytes: u64| {
        [
            name,
            count(n_tensors as usize, "tensor"),
            format!("{} parameters", grouped(n_parameters)),
            format!("{} bytes", grouped(n_bytes)),
        ]
    };
    let mut rows: Vec<[String; 4]> = sizes
        .types
        .iter()
        .map(|t| row(t.ty.to_string(), t.n_tensors, t.n_parameters, t.n_bytes))
        .collect();
    let (n_tensors, n_parameters) = (sizes.n_tensors, sizes.n_parameters);
    rows.push(row("total".into(), n_tensors, n_parameters, sizes.n_bytes));
    use Align::{Left, Right};
    write_rows(out, &[Left, Right, Right, Right], &rows)?;
    writeln!(out, "  {:.2} bits per weight", sizes.bits_per_weight())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (name, expected, layer) in [
            ("token_embd.weight", "token_embd.weight", None),
            ("blk.12.attn_q.weight", "blk.N.attn_q.weight", Some(12)),
            ("v.blk.3.mlp.0.weight", "v.blk.N.mlp.0.weight", Some(3)),
            ("a\u{1b}[1m.b", "a\\u{1b}[1m.b", None),
        ] {
            assert_eq!(pattern(name), (expected.to_string(), layer));
        }
    }

    #[test]
    fn cells_steer_nothing() {
        let mut out = Vec::new();
        let rows = [["a\u{1b}[2J", "1"], ["b", "2\u{9b}\n"]].map(|row| row.map(str::to_string));
        write_rows(&mut out, &[Align::Left; 2], &rows).expect("memory");
        let text = String::from_utf8(out).expect("UTF-8");
        assert_eq!(text, "  a\\u{1b}[2J  1\n  b           2\\u{9b}\\n\n");
    }

    #[test]
    fn ranges() {
        assert_eq!(ranges_text(&[]), "");
        assert_eq!(ranges_text(&[0, 1, 2, 5, 8, 9]), "0-2, 5, 8-9");
    }
}
