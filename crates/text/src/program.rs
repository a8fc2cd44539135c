//! A template's source as a program that cannot overflow the stack, outgrow
//! its budget or run forever.
//!
//! Three things make it so. The source is limited before it is parsed: its
//! bytes, and the tokens of one tag. Everything that the parser, the compiler
//! and the engine do recursively runs on a thread with [`STACK_BYTES`], which
//! is enough for the worst source within the limits. And the compiled
//! instructions are rewritten: operands are paid for before an instruction
//! reads them, and what it makes is checked before the next one sees it
//! (`meter.rs`).
//!
//! What a reader would get wrong: constants are computed while the template is
//! compiled, before any budget exists. `'a' * 100000000` would do its work
//! there, so [`checked`] makes the left side of every `*` something that the
//! compiler does not compute.
//!
//! The engine gives this access under its feature `unstable_machinery`, which
//! promises no stability: its version is pinned.

use crate::builtins::{
    APPLY, APPLY_OFTEN, KEEP, KEEP_TEXTS, NO_CONSTANT, READ, READ_ALL, READ_KEY, REPEAT, SET,
    SLICE, environment,
};
use crate::error::Error;
use crate::meter::{MOST_VALUE_BYTES, Meter, Stop};
use crate::template::{MOST_INSTRUCTIONS, MOST_SOURCE_BYTES, MOST_TAG_TOKENS};
use minijinja::machinery::{
    Instruction, Instructions, Token, Vm, WhitespaceConfig, get_compiled_template,
    make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, ErrorKind, Value};
use std::collections::{BTreeMap, HashSet};
use std::thread;

const NAME: &str = "chat_template";

/// Stack of the thread that parses, compiles and runs a template. Only what is
/// touched takes memory.
const STACK_BYTES: usize = 128 << 20;

/// Runs `work` where it may recurse as deep as a template within the limits
/// makes it.
fn on_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |reason: String| Error::TemplateFailed { reason };
    thread::scope(|scope| {
        thread::Builder::new()
            .name(NAME.to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|error| failed(format!("its thread cannot be started: {error}")))?
            .join()
            .map_err(|_| failed("the template engine gave up".to_owned()))?
    })
}

/// A source within the limits, made ready for [`run`], and the variables that
/// it reads.
pub(crate) fn compile(source: &str) -> Result<(String, HashSet<String>), Error> {
    if source.len() > MOST_SOURCE_BYTES {
        return Err(Error::TemplateSourceTooLarge {
            found_bytes: source.len(),
            most_bytes: MOST_SOURCE_BYTES,
        });
    }
    let source = checked(source)?;
    let variables = on_deep_stack(|| {
        let environment = environment(&Meter::new());
        let template = environment
            .template_from_named_str(NAME, &source)
            .map_err(|error| syntax(&error))?;
        if let Some(name) = get_compiled_template(&template).blocks.keys().next() {
            return Err(Error::TemplateSyntax {
                reason: format!("block {}: blocks are not supported", gguf::shown(name)),
            });
        }
        let program = &get_compiled_template(&template).instructions;
        let reads_messages = instructions(program)
            .any(|instruction| matches!(instruction, Instruction::Lookup("messages")));
        if !reads_messages {
            return Err(Error::TemplateWithoutMessages);
        }
        // The engine's own list overlooks what only slices read.
        let mut names = template.undeclared_variables(false);
        names.extend(read_only(program));
        Ok(names)
    })?;
    Ok((source, variables))
}

/// Renders a source that [`compile`] made ready.
pub(crate) fn run(source: &str, variables: &BTreeMap<String, Value>) -> Result<String, Error> {
    on_deep_stack(|| {
        let meter = Meter::new();
        // The names of the program's own functions are not for callers.
        let names = variables.iter().filter(|(name, _)| !name.starts_with('('));
        let root = Value::from_iter(names.map(|(name, value)| (name.as_str(), value.clone())));
        meter.check(&root).map_err(|error| failure(&error))?;
        let mut environment = environment(&meter);
        environment.set_fuel(Some(MOST_INSTRUCTIONS));
        let template = environment
            .template_from_named_str(NAME, source)
            .map_err(|error| syntax(&error))?;
        let instructions = metered(&get_compiled_template(&template).instructions);
        let mut prompt = String::new();
        Vm::new(&environment)
            .eval(
                &instructions,
                root,
                &BTreeMap::new(),
                &mut make_string_output(&mut prompt),
                AutoEscape::None,
            )
            .map_err(|error| failure(&error))?;
        match prompt.len() as u64 <= MOST_VALUE_BYTES {
            true => Ok(prompt),
            false => Err(Stop::ValueSize.into_error()),
        }
    })
}

/// Checks the tags of a source, and keeps the compiler from computing products.
/// Templates made for training wrap the answer in `{% generation %}`, which has no
/// effect on the text: it becomes a condition that always holds.
fn checked(source: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    let mut n_tokens = 0;
    let mut before = Token::BlockStart;
    let tokens = tokenize(source, false, SyntaxConfig, WhitespaceConfig::default());
    for token in tokens {
        let (token, span) = token.map_err(|error| syntax(&error))?;
        match token {
            Token::TemplateData(_) | Token::BlockStart | Token::VariableStart => n_tokens = 0,
            Token::Ident(word @ ("generation" | "endgeneration"))
                if matches!(before, Token::BlockStart) =>
            {
                out.push_str(&source[copied..span.start_offset as usize]);
                out.push_str(match word {
                    "generation" => "if true",
                    _ => "endif",
                });
                copied = span.end_offset as usize;
            }
            // An operator, not the `*` of `f(*list)`.
            Token::Mul if !matches!(before, Token::ParenOpen | Token::Comma) => {
                let at = span.start_offset as usize;
                out.push_str(&source[copied..at]);
                out.push_str(NO_CONSTANT);
                copied = at;
            }
            _ => {}
        }
        n_tokens += 1;
        if n_tokens > MOST_TAG_TOKENS {
            return Err(Error::TemplateTagTooLong {
                line: usize::from(span.start_line),
                most_tokens: MOST_TAG_TOKENS,
            });
        }
        before = token;
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

fn instructions<'p, 's>(
    program: &'p Instructions<'s>,
) -> impl Iterator<Item = &'p Instruction<'s>> {
    (0..program.len() as u32).filter_map(|index| program.get(index))
}

/// The variables and functions that a program reads and nowhere sets.
fn read_only(program: &Instructions) -> HashSet<String> {
    let mut names = HashSet::new();
    let mut own = HashSet::new();
    for instruction in instructions(program) {
        match instruction {
            Instruction::Lookup(name) | Instruction::CallFunction(name, _) => {
                names.insert((*name).to_owned());
            }
            Instruction::StoreLocal(name) => {
                own.insert(*name);
            }
            _ => {}
        }
    }
    names.retain(|name| !own.contains(name.as_str()));
    names
}

/// The same program, paying for what it reads and makes.
fn metered<'s>(program: &Instructions<'s>) -> Instructions<'s> {
    let mut out = Instructions::new(program.name(), program.source());
    let n = program.len() as u32;
    let mut starts = Vec::with_capacity(program.len() + 1);
    for index in 0..n {
        starts.push(out.len() as u32);
        let line = program.get_line(index).unwrap_or(0) as u16;
        let Some(instruction) = program.get(index) else {
            break;
        };
        for instruction in paid(instruction) {
            out.add_with_line(instruction, line);
        }
    }
    starts.push(out.len() as u32);
    for index in 0..out.len() as u32 {
        if let Some(
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _),
        ) = out.get_mut(index)
        {
            *target = starts[*target as usize];
        }
    }
    out
}

/// One instruction with what has to stand around it.
fn paid<'s>(instruction: &Instruction<'s>) -> Vec<Instruction<'s>> {
    use Instruction as I;
    let call = |name: &'static str, n_operands| I::CallFunction(name, Some(n_operands));
    let mut out = Vec::new();
    // Operands go through a function as one list and come back in its order.
    let mut before = |name: &'static str, n_operands: usize| {
        out.extend([
            I::BuildList(Some(n_operands)),
            call(name, 1),
            I::UnpackList(n_operands),
        ]);
    };
    match instruction {
        I::Add => before(READ, 2),
        // A string's characters are counted when a loop over it starts.
        I::PushLoop(_) => before(READ, 1),
        I::StringConcat => before(READ_ALL, 2),
        I::Mul => before(REPEAT, 2),
        I::Slice => before(SLICE, 4),
        I::GetItem => before(READ_KEY, 2),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::In | I::CompareAndPreserve(_) => {
            before(READ_ALL, 2);
        }
        I::ApplyFilter("sort" | "dictsort" | "map", Some(n), _) => {
            before(APPLY_OFTEN, (*n).into());
        }
        I::ApplyFilter(_, Some(n), _)
        | I::PerformTest(_, Some(n), _)
        | I::CallMethod(_, Some(n)) => {
            before(APPLY, (*n).into());
        }
        I::MergeKwargs(n) | I::UnpackLists(n) => before(READ, *n),
        I::UnpackList(_) => before(READ, 1),
        _ => {}
    }
    match instruction {
        // As a value, so that the budget sees it.
        I::EmitRaw(text) => out.extend([
            I::LoadConst(Value::from_safe_string((*text).to_owned())),
            I::Emit,
        ]),
        I::SetAttr(name) => out.extend([
            I::LoadConst(Value::from(*name)),
            call(SET, 3),
            I::DiscardTop,
        ]),
        other => out.push(other.clone()),
    }
    if let I::Add
    | I::Mul
    | I::StringConcat
    | I::Slice
    | I::BuildList(_)
    | I::BuildMap(_)
    | I::ApplyFilter(..)
    | I::CallFunction(..)
    | I::CallMethod(..)
    | I::CallObject(_)
    | I::EndCapture = instruction
    {
        let keep = match instruction {
            // Its items are texts that the filter in it has made.
            I::ApplyFilter("map", ..) => KEEP_TEXTS,
            _ => KEEP,
        };
        out.push(call(keep, 1));
    }
    out
}

fn syntax(error: &minijinja::Error) -> Error {
    // What the tokenizer finds on its own has no template's name.
    let reason = error
        .to_string()
        .replace("(in <string>:", "(in chat_template:");
    Error::TemplateSyntax {
        reason: gguf::shown(&reason),
    }
}

/// The named error behind an error of the engine, which wraps one error per
/// macro that it came through.
fn failure(error: &minijinja::Error) -> Error {
    let mut innermost = error.to_string();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(stop) = error.downcast_ref::<Stop>() {
            return stop.clone().into_error();
        }
        if let Some(engine) = error.downcast_ref::<minijinja::Error>() {
            if engine.kind() == ErrorKind::OutOfFuel {
                return Error::TemplateInstructions {
                    most: MOST_INSTRUCTIONS,
                };
            }
            innermost = engine.to_string();
        }
        cause = error.source();
    }
    Error::TemplateFailed {
        reason: gguf::shown(&innermost),
    }
}
