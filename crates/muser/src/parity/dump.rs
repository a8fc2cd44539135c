//! Every intermediate value of a pass as .npy files.
//!
//! A file is named as llama.cpp names its graph nodes: `l_out-3.npy` is the
//! output of layer 3, `result_output.npy` the logits. Each holds `[rows,
//! columns]` f32, one row per token; `tokens.npy` holds the token ids.

use super::{Args, passes};
use crate::model_file::{self, Device, Kv};
use crate::terminal::{count, print_line};
use anyhow::{Context, ensure};
use cpu::Cpu;
use cuda::Cuda;
use model::{Backend, Model, Probes, Reference};
use npyz::WriterBuilder;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

/// Nodes that belong to no layer.
const WHOLE_MODEL: [&str; 3] = ["inp_embd", "result_norm", "result_output"];

/// Name of a file and its values, row after row.
type Nodes = BTreeMap<String, Vec<f32>>;

/// Writes the dump to the directory `dir`, which is made if it is missing.
pub fn run(args: &Args, dir: &Path) -> anyhow::Result<ExitCode> {
    let file = args.model.open()?;
    let tokens = args.tokens(&file)?;
    let load = args.load_args(args.device(), args.kv.unwrap_or(Kv::F32));
    let nodes = match args.device() {
        Device::Reference => {
            let mut be = Reference::new();
            be.record_probes();
            nodes(load.load_on(be, &file)?, &tokens, Reference::take_probes)?
        }
        Device::Cuda(ordinal) => {
            let mut be = model_file::cuda(ordinal)?;
            be.record_probes();
            nodes(load.load_on(be, &file)?, &tokens, Cuda::take_probes)?
        }
        Device::Cpu => {
            let mut be = args.cpu.device()?;
            be.record_probes();
            nodes(load.load_on(be, &file)?, &tokens, Cpu::take_probes)?
        }
    };
    write(dir, &tokens, &nodes).with_context(|| format!("cannot write to {}", dir.display()))?;
    if args.json {
        let list = nodes.iter().map(|(name, values)| {
            let shape = [tokens.len(), values.len() / tokens.len()];
            json!({ "node": name, "file": format!("{name}.npy"), "shape": shape })
        });
        let report = json!({
            "model": file.name,
            "directory": dir.display().to_string(),
            "tokens": tokens,
            "nodes": list.collect::<Vec<_>>(),
        });
        print_line(format_args!("{report:#}"))?;
    } else {
        print_line(format_args!(
            "{} of {} written to {}",
            count(nodes.len(), "node"),
            count(tokens.len(), "row"),
            dir.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every value of `tokens` through `model`, whose backend keeps them.
fn nodes<B: Backend>(
    mut model: Model<B>,
    tokens: &[u32],
    take: fn(&mut B) -> Probes,
) -> anyhow::Result<Nodes> {
    let mut nodes = Nodes::new();
    passes(&mut model, tokens, |model| {
        for (name, layer, values) in take(model.backend_mut()).values {
            let name = match WHOLE_MODEL.contains(&name) {
                true => name.to_string(),
                false => format!("{name}-{layer}"),
            };
            nodes.entry(name).or_default().extend(values);
        }
    })?;
    Ok(nodes)
}

fn write(dir: &Path, tokens: &[u32], nodes: &Nodes) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    // Files of another model among the new ones would mislead.
    ensure!(
        std::fs::read_dir(dir)?.next().is_none(),
        "found files in it, expected a new or an empty directory"
    );
    let ids = tokens.iter().map(|&id| i64::from(id));
    write_npy(&dir.join("tokens.npy"), &[tokens.len() as u64], ids)?;
    for (name, values) in nodes {
        let shape = [tokens.len(), values.len() / tokens.len()].map(|n| n as u64);
        write_npy(
            &dir.join(format!("{name}.npy")),
            &shape,
            values.iter().copied(),
        )?;
    }
    Ok(())
}

fn write_npy<T: npyz::AutoSerialize>(
    path: &Path,
    shape: &[u64],
    values: impl Iterator<Item = T>,
) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let options = npyz::WriteOptions::new().default_dtype();
    let mut writer = options.shape(shape).writer(&mut file).begin_nd()?;
    writer.extend(values)?;
    writer.finish()?;
    file.flush()
}
