//! What the host asks for.

use minijinja::Value;

/// A render: `{"ctx":{..},"now":[Y,m,d,H,M,S,weekday],"fuel":n,"max_out":n}`.
/// The weekday counts from Monday = 0.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Render {
    /// The variables of the template, in order.
    pub ctx: Value,
    /// The time that strftime_now formats: renders are a function of their request.
    pub now: [i64; 7],
    /// Instructions that the render may take.
    pub fuel: u64,
    /// Bytes that it may write.
    pub max_out: usize,
}
