//! `{% generation %}` marks what a model trains on. It changes no text, so it
//! becomes `{% if true %}`.

const OPEN: &str = "generation";
const CLOSE: &str = "endgeneration";

/// Returns source without generation tags.
pub fn strip(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (head, tail) = rest.split_at(start);
        out.push_str(head);
        let Some(end) = tail.find("%}") else {
            rest = tail;
            break;
        };
        let tag = &tail[..end];
        match tag[2..].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            OPEN => out.push_str(&tag.replace(OPEN, "if true")),
            CLOSE => out.push_str(&tag.replace(CLOSE, "endif")),
            _ => out.push_str(tag),
        }
        rest = &tail[end..];
    }
    out.push_str(rest);
    out
}
