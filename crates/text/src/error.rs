//! Everything that can be wrong between text and tokens, by name.
//!
//! Texts in here that come from a file or a caller went through
//! [`gguf::shown`]: they are short and cannot move a cursor.

/// Why a tokenizer could not be built from a file's metadata, or why a
/// template, turn or tool call could not be handled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A metadata key holds a value of the wrong type.
    #[error(transparent)]
    Metadata(#[from] gguf::Error),
    /// A key that the tokenizer cannot do without is missing.
    #[error("metadata key {key}: missing, expected {wanted}")]
    KeyMissing {
        /// The key.
        key: &'static str,
        /// What it should hold.
        wanted: &'static str,
    },
    /// `tokenizer.ggml.model` names a model that is not implemented.
    #[error("tokenizer.ggml.model: found \"{found}\", expected one of {supported}")]
    UnknownModel {
        /// The name in the file.
        found: String,
        /// The names that are implemented.
        supported: &'static str,
    },
    /// `tokenizer.ggml.pre` names a splitting rule that is not implemented.
    #[error("tokenizer.ggml.pre: found \"{found}\", expected one of {supported}")]
    UnknownPre {
        /// The name in the file.
        found: String,
        /// The names that are implemented.
        supported: String,
    },
    /// The vocabulary has no token, or more than fit a u32.
    #[error("tokenizer.ggml.tokens: found {found} tokens, expected 1 to {most}")]
    TokenCount {
        /// Number of tokens in the file.
        found: usize,
        /// The most that are allowed.
        most: u32,
    },
    /// An array that runs parallel to the tokens has another length.
    #[error(
        "{key}: found {found} entries, expected {expected} (the length of tokenizer.ggml.tokens)"
    )]
    ArrayLength {
        /// The key of the array.
        key: &'static str,
        /// Its length.
        found: usize,
        /// Number of tokens.
        expected: usize,
    },
    /// A token type outside the six that the format defines.
    #[error("tokenizer.ggml.token_type: token {id} has type {found}, expected 1 to 6")]
    UnknownTokenType {
        /// The token.
        id: u32,
        /// Its type in the file.
        found: i64,
    },
    /// Two ids have the same text.
    #[error(
        "tokenizer.ggml.tokens: tokens {first} and {second} are both \"{text}\", expected distinct texts"
    )]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// The text of both.
        text: String,
    },
    /// A byte token of a SentencePiece vocabulary is not spelled `<0xXX>`.
    #[error(
        "tokenizer.ggml.tokens: byte token {id} is \"{found}\", expected <0xXX> with two hexadecimal digits"
    )]
    ByteTokenSpelling {
        /// The token.
        id: u32,
        /// Its text.
        found: String,
    },
    /// A SentencePiece vocabulary cannot spell a blank.
    #[error(
        "tokenizer.ggml.tokens: no normal token \"\u{2581}\", expected one that stands for a blank"
    )]
    BlankTokenMissing,
    /// A score is not a number.
    #[error("tokenizer.ggml.scores: token {id} has score NaN, expected a number")]
    ScoreNotANumber {
        /// The token.
        id: u32,
    },
    /// A merge is not two texts with one blank between them.
    #[error(
        "tokenizer.ggml.merges: merge {index} is \"{found}\", expected \"LEFT RIGHT\" with one blank"
    )]
    MergeWithoutBlank {
        /// Place in the list, from 0.
        index: usize,
        /// The entry.
        found: String,
    },
    /// A merge names or makes a text that text cannot become.
    #[error(
        "tokenizer.ggml.merges: merge {index} (\"{merge}\") needs \"{token}\", which is {found}, expected a normal token"
    )]
    MergeUnknownToken {
        /// Place in the list, from 0.
        index: usize,
        /// The entry.
        merge: String,
        /// The part or the whole that is no normal token.
        token: String,
        /// What it is instead.
        found: &'static str,
    },
    /// A special token's id lies outside the vocabulary.
    #[error("{key}: found {found}, expected an id below {n_vocab}")]
    SpecialIdOutOfRange {
        /// The key.
        key: &'static str,
        /// The id in the file.
        found: u32,
        /// Number of tokens.
        n_vocab: usize,
    },
    /// The file asks for a token at one end of the text but does not name it.
    #[error("{id_key}: missing, expected an id because {flag_key} is true")]
    SpecialIdMissing {
        /// The key that should name the token.
        id_key: &'static str,
        /// The key that asks for it.
        flag_key: &'static str,
    },
    /// The control and user-defined tokens do not fit one automaton.
    #[error("tokenizer.ggml.token_type: {found} control and user-defined tokens: {reason}")]
    TooManySpecialTokens {
        /// Number of such tokens.
        found: usize,
        /// What does not fit.
        reason: String,
    },
    /// The tokenizers crate refused the vocabulary.
    #[error("tokenizer.ggml.merges: {reason}")]
    Bpe {
        /// What the crate says.
        reason: String,
    },
    /// The file has no chat template and none was given.
    #[error(
        "tokenizer.chat_template: missing, expected a chat template in the file; give one with --chat-template FILE, or use plain completion with --raw"
    )]
    NoChatTemplate,
    /// A chat template's source is too long.
    #[error("chat template: found {found_bytes} bytes of source, expected at most {most_bytes}")]
    TemplateSourceTooLarge {
        /// Its length.
        found_bytes: usize,
        /// The most that is allowed.
        most_bytes: usize,
    },
    /// A tag of a chat template has too many tokens.
    #[error("chat template: the tag in line {line} has more than {most_tokens} tokens")]
    TemplateTagTooLong {
        /// Where its last token stands.
        line: usize,
        /// The most that are allowed.
        most_tokens: usize,
    },
    /// A chat template never reads the messages.
    #[error("chat template: it does not read messages, expected a template that renders them")]
    TemplateWithoutMessages,
    /// A chat template rendered nothing of what the messages say.
    #[error("chat template: nothing of the messages is in the prompt, expected their texts")]
    TemplateDropsMessages,
    /// A conversation has no messages.
    #[error("conversation: found no messages, expected at least one")]
    NoMessages,
    /// A message says nothing at all.
    #[error(
        "conversation: message {index} ({role}) has no content, expected a text or a list of parts; only reasoning or tool calls can stand without"
    )]
    MessageWithoutContent {
        /// Place in the list, from 0.
        index: usize,
        /// Its role.
        role: String,
    },
    /// A chat template does not compile.
    #[error("chat template: {reason}")]
    TemplateSyntax {
        /// What is wrong and where.
        reason: String,
    },
    /// A chat template refused the conversation with `raise_exception`.
    #[error("chat template refuses the conversation: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// A chat template did not end.
    #[error("chat template: still running after {most} instructions")]
    TemplateInstructions {
        /// The most that are allowed.
        most: u64,
    },
    /// A chat template makes and reads too much.
    #[error(
        "chat template: the values that it makes and reads are more than {most_bytes} bytes altogether"
    )]
    TemplateWork {
        /// The most that is allowed.
        most_bytes: u64,
    },
    /// A value of a chat template is too large.
    #[error("chat template: it holds a value of more than {most_bytes} bytes")]
    TemplateValueTooLarge {
        /// The most that is allowed.
        most_bytes: u64,
    },
    /// A value of a chat template is nested too deeply.
    #[error("chat template: it holds a value of more than {most_levels} levels")]
    TemplateValueTooDeep {
        /// The most that are allowed.
        most_levels: usize,
    },
    /// A chat template failed while it ran.
    #[error("chat template failed: {reason}")]
    TemplateFailed {
        /// What is wrong and where.
        reason: String,
    },
    /// A template treats text by the control tokens that it spells, so that
    /// they cannot be kept apart from those that it writes.
    #[error(
        "chat template: it looks for a control token that a message spells as text, expected messages without it"
    )]
    TemplateEditsControlTokens,
    /// A template puts a control token together from pieces.
    #[error(
        "chat template: it puts the control token \"{token}\" together from pieces, expected it in one piece"
    )]
    ControlTokenInPieces {
        /// The token.
        token: String,
    },
    /// A conversation holds nearly every private-use character.
    #[error(
        "conversation: it holds nearly all private-use characters of Unicode, expected some to be free to mark control tokens"
    )]
    NoFreeMark,
    /// The arguments of a tool call are no object.
    #[error("tool call {call}: arguments are {found}, expected a JSON object")]
    ToolArguments {
        /// Name and id of the call.
        call: String,
        /// What the arguments are instead.
        found: String,
    },
    /// A tool has no name.
    #[error("tool: function.name is {found}, expected a name")]
    ToolName {
        /// What is there instead.
        found: &'static str,
    },
    /// A word that names no level of reasoning.
    #[error("reasoning strength: found \"{found}\", expected low, medium, high or xhigh")]
    UnknownReasoning {
        /// The word.
        found: String,
    },
    /// There is no such day, or the year is out of range.
    #[error("found the date {found}, expected a day of the years 1 to 9999, as 2026-01-31")]
    Date {
        /// The date.
        found: String,
    },
    /// A `strftime` code that is not known.
    #[error("strftime_now: found the code \"{found}\", expected one of Python's")]
    DateCode {
        /// The code.
        found: String,
    },
    /// The vocabulary does not fit the grammar library.
    #[error("tokenizer.ggml.tokens: no grammar can work on them: {reason}")]
    GrammarVocabulary {
        /// What the library says.
        reason: String,
    },
    /// A grammar is too long.
    #[error("{kind}: found {found_bytes} bytes, expected at most {most_bytes}")]
    GrammarTooLarge {
        /// JSON schema, regular expression or Lark grammar.
        kind: &'static str,
        /// Its length.
        found_bytes: usize,
        /// The most that is allowed.
        most_bytes: usize,
    },
    /// A grammar is wrong, not supported or too complex.
    #[error("{kind}: {reason}")]
    Grammar {
        /// JSON schema, regular expression or Lark grammar.
        kind: &'static str,
        /// What is wrong and where.
        reason: String,
    },
    /// A formatted answer could never end.
    #[error("tokenizer.ggml.eos_token_id: missing, expected a token that ends a formatted answer")]
    NoEndToken,
    /// A call is demanded, but there is nothing to call.
    #[error("tool_choice: found no tools, expected at least one to choose from")]
    ToolChoiceWithoutTools,
    /// A call of a tool is demanded that is not there.
    #[error("tool_choice: found the tool \"{found}\", expected one of the tools of the request")]
    UnknownTool {
        /// Its name.
        found: String,
    },
    /// The model's call format cannot say what the tool demands.
    #[error("tool \"{tool}\": it cannot be called: {reason}")]
    ToolNotCallable {
        /// Name of the tool.
        tool: String,
        /// What cannot be said.
        reason: String,
    },
    /// The schema of a parameter cannot be enforced.
    #[error("tool \"{tool}\", parameter \"{parameter}\": {reason}")]
    ToolSchema {
        /// Name of the tool.
        tool: String,
        /// Name of the parameter.
        parameter: String,
        /// What is wrong and where.
        reason: String,
    },
    /// A call is demanded of a model whose turns have none.
    #[error("tool_choice: this model's chat format has no tool calls, expected auto or none")]
    FormatWithoutCalls,
    /// Reasoning is bounded of a model whose turns have none.
    #[error("reasoning budget: this model's chat format has no reasoning to bound")]
    FormatWithoutReasoning,
    /// A stop string would stop everywhere.
    #[error("stop string {index}: found an empty string, expected at least one character")]
    EmptyStopString {
        /// Place in the list, from 0.
        index: usize,
    },
}
