//! The guest: MiniJinja behind five functions, for wasm32-unknown-unknown.
//!
//! The module imports nothing, so a template has no clock, no files, no random
//! source and no way to call its host. One instance holds one template.
//!
//! | function               | what it does                                         |
//! |------------------------|------------------------------------------------------|
//! | `guest_abi() -> i32`   | version of this table                                |
//! | `guest_input(n) -> i32`| address of an input buffer of at least n bytes       |
//! | `guest_compile(n)`     | the first n input bytes are the template             |
//! | `guest_render(n)`      | the first n input bytes are a request, see `request` |
//!
//! Compile and render return an i64: the address of the output in the upper 32
//! bits, then 4 bits of status, then 28 bits of length. The output is text: the
//! render, or the reason of a failure. Both buffers live until the next call.

mod engine;
mod generation;
mod json;
mod request;
mod time;

use std::cell::RefCell;

/// Version of the functions below. The host refuses another one.
const ABI: u32 = 2;

/// Largest length that the result of a call can carry.
const MAX_LEN: usize = (1 << 28) - 1;

/// How a call ended. The numbers are part of the ABI.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// The output is what was asked for.
    Ok = 0,
    /// The template is wrong, or does not fit the conversation.
    Template = 1,
    /// The template called raise_exception: it refuses this conversation.
    Raised = 2,
    /// Fuel or output ran out.
    Limit = 3,
    /// The host's request makes no sense.
    Request = 4,
}

/// Why a call failed: a status and a text for the operator of the model.
pub type Failure = (Status, String);

thread_local! {
    static INPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static OUTPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

fn call(n: usize, f: impl FnOnce(&[u8], &mut Vec<u8>) -> Result<(), Failure>) -> u64 {
    INPUT.with_borrow(|input| {
        OUTPUT.with_borrow_mut(|out| {
            out.clear();
            let status = match input.get(..n).ok_or((Status::Request, "input is too short".into())) {
                Err(e) => Err(e),
                Ok(bytes) => f(bytes, out),
            };
            let status = match status {
                Ok(()) => Status::Ok,
                Err((status, text)) => {
                    out.clear();
                    out.extend_from_slice(text.as_bytes());
                    status
                }
            };
            out.truncate(MAX_LEN);
            ((out.as_ptr() as u64) << 32) | ((status as u64) << 28) | out.len() as u64
        })
    })
}

#[no_mangle]
pub extern "C" fn guest_abi() -> u32 {
    ABI
}

#[no_mangle]
pub extern "C" fn guest_input(n: usize) -> *mut u8 {
    INPUT.with_borrow_mut(|input| {
        if input.len() < n {
            // A new vector: there is no reason to copy what the old one held.
            *input = vec![0; n];
        }
        input.as_mut_ptr()
    })
}

#[no_mangle]
pub extern "C" fn guest_compile(n: usize) -> u64 {
    call(n, |input, out| {
        // The output buffer exists before the first render, and so before the
        // host takes its picture of the memory.
        out.reserve(64 << 10);
        let source = std::str::from_utf8(input).map_err(|e| (Status::Template, e.to_string()))?;
        engine::compile(source)
    })
}

#[no_mangle]
pub extern "C" fn guest_render(n: usize) -> u64 {
    call(n, engine::render)
}
