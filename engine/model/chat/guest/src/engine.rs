//! The environment that templates were written for: jinja2 as Hugging Face's
//! apply_chat_template sets it up.

use std::cell::{Cell, RefCell};
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use crate::{generation, json, request, time, Failure, Status};

const NAME: &str = "template";

thread_local! {
    static ENV: RefCell<Option<Environment<'static>>> = const { RefCell::new(None) };
    static RAISED: Cell<bool> = const { Cell::new(false) };
}

/// An error of an operation, with a text.
pub fn bad(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text)
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", json::tojson);
    env.add_function("strftime_now", time::strftime_now);
    env.add_function("raise_exception", |text: String| -> Result<Value, Error> {
        RAISED.set(true);
        Err(bad(text))
    });
    Ok(env)
}

fn text(e: &Error) -> String {
    let mut s = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(inner) = source {
        s.push_str(": ");
        s.push_str(&inner.to_string());
        source = inner.source();
    }
    s
}

fn template_failure(e: Error) -> Failure {
    (Status::Template, text(&e))
}

/// Makes source the template of this instance.
pub fn compile(source: &str) -> Result<(), Failure> {
    let mut env = environment().map_err(template_failure)?;
    env.add_template_owned(NAME, generation::strip(source)).map_err(template_failure)?;
    ENV.set(Some(env));
    Ok(())
}

/// A writer that stops at a number of bytes.
struct Capped<'a> {
    out: &'a mut Vec<u8>,
    max: usize,
    full: bool,
}

impl io::Write for &mut Capped<'_> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        if b.len() > self.max - self.out.len() {
            self.full = true;
            return Err(io::Error::other("output limit"));
        }
        self.out.extend_from_slice(b);
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Renders the template of this instance into out, which is empty.
pub fn render(input: &[u8], out: &mut Vec<u8>) -> Result<(), Failure> {
    // The position of a JSON error says nothing about the text, and is enough.
    let request: request::Render = serde_json::from_slice(input)
        .map_err(|e| (Status::Request, format!("request is wrong at line {} column {}", e.line(), e.column())))?;
    time::set(request.now);
    RAISED.set(false);
    ENV.with_borrow_mut(|env| {
        let env = env.as_mut().ok_or((Status::Request, "there is no template".to_string()))?;
        env.set_fuel(Some(request.fuel));
        let template = env.get_template(NAME).map_err(template_failure)?;
        let mut w = Capped { out, max: request.max_out, full: false };
        let result = template.render_captured_to(request.ctx, &mut w).map(|_| ());
        let full = w.full;
        result.map_err(|e| {
            let status = if RAISED.get() {
                Status::Raised
            } else if full || out_of_fuel(&e) {
                Status::Limit
            } else {
                Status::Template
            };
            (status, text(&e))
        })
    })
}

// Out of fuel inside a macro or a filter arrives wrapped.
fn out_of_fuel(e: &Error) -> bool {
    if e.kind() == ErrorKind::OutOfFuel {
        return true;
    }
    let mut source = std::error::Error::source(e);
    while let Some(inner) = source {
        if inner.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return true;
        }
        source = inner.source();
    }
    false
}
