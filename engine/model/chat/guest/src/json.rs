//! tojson, spaced and ordered as Python's json.dumps with ensure_ascii=False.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, State};

use crate::engine::bad;

/// Depth at which a value is refused, below what the guest's stack holds.
const MAX_DEPTH: usize = 100;

/// Widest indent in spaces.
const MAX_INDENT: usize = 64;

struct Writer {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

fn float(f: f64) -> String {
    if f.is_nan() {
        return "NaN".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let s = format!("{f:e}");
    let (mantissa, exponent) = s.split_once('e').unwrap_or((&s, "0"));
    let e: i32 = exponent.parse().unwrap_or(0);
    if f != 0.0 && !(-4..16).contains(&e) {
        format!("{mantissa}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs())
    } else {
        format!("{f:?}")
    }
}

fn string(out: &mut String, s: &str, ascii: bool) {
    use std::fmt::Write;
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c if ascii && (c as u32) > 0x7e => {
                let mut units = [0u16; 2];
                for u in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{u:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

impl Writer {
    fn newline(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn name(key: &Value) -> Result<String, Error> {
        Ok(match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_string(),
            ValueKind::None => "null".into(),
            ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
            ValueKind::Number if key.is_integer() => key.to_string(),
            ValueKind::Number => float(f64::try_from(key.clone())?),
            _ => return Err(bad("tojson: a key is no string, number, boolean or none")),
        })
    }

    fn value(&self, out: &mut String, v: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(bad("tojson: nested too deeply"));
        }
        match v.kind() {
            ValueKind::Undefined => return Err(bad("tojson: the value is undefined")),
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if v.is_true() { "true" } else { "false" }),
            ValueKind::Number if v.is_integer() => out.push_str(&v.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(v.clone())?)),
            ValueKind::String => string(out, v.as_str().unwrap_or_default(), self.ascii),
            ValueKind::Map => {
                let mut keys: Vec<Value> = v.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item);
                    }
                    self.newline(out, depth + 1);
                    string(out, &Self::name(key)?, self.ascii);
                    out.push_str(&self.key);
                    self.value(out, &v.get_item(key)?, depth + 1)?;
                }
                if !keys.is_empty() {
                    self.newline(out, depth);
                }
                out.push('}');
            }
            ValueKind::Seq => {
                out.push('[');
                let mut any = false;
                for item in v.try_iter()? {
                    if any {
                        out.push_str(&self.item);
                    }
                    any = true;
                    self.newline(out, depth + 1);
                    self.value(out, &item, depth + 1)?;
                }
                if any {
                    self.newline(out, depth);
                }
                out.push(']');
            }
            kind => return Err(bad(format!("tojson: a {kind} has no JSON"))),
        }
        Ok(())
    }
}

/// The filter: tojson(indent, ensure_ascii, sort_keys, separators).
pub fn tojson(state: &State, v: &Value, indent: Option<Value>, kw: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(i) => Some(i),
        None => kw.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        None => None,
        Some(i) if i.is_none() => None,
        Some(i) => Some(match i.as_str() {
            Some(s) => s.to_string(),
            None => " ".repeat(usize::try_from(i)?.min(MAX_INDENT)),
        }),
    };
    let ascii = kw.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort = kw.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let (item, key) = match kw.get::<Option<Vec<String>>>("separators")? {
        Some(s) if s.len() == 2 => (s[0].clone(), s[1].clone()),
        Some(_) => return Err(bad("tojson: separators are two strings")),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    kw.assert_all_used()?;
    let mut out = String::new();
    Writer { indent, item, key, ascii, sort }.value(&mut out, v, 0)?;
    state.consume_fuel(out.len() as u64 / 4)?;
    Ok(Value::from(out))
}
