//! strftime_now over a time that the host passes in.

use std::cell::Cell;

use minijinja::Error;

use crate::engine::bad;

const MONTHS: [&str; 12] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

thread_local! {
    static NOW: Cell<[i64; 7]> = const { Cell::new([1970, 1, 1, 0, 0, 0, 3]) };
}

/// Sets the time of this render: year, month, day, hour, minute, second, weekday.
pub fn set(now: [i64; 7]) {
    NOW.set(now);
}

/// Formats the time of this render. Other directives than these are an error.
pub fn strftime_now(format: &str) -> Result<String, Error> {
    let [year, month, day, hour, minute, second, weekday] = NOW.get();
    let month_name = MONTHS[(month.clamp(1, 12) - 1) as usize];
    let day_name = DAYS[weekday.clamp(0, 6) as usize];
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &format!("{year:04}"),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{month:02}"),
            Some('d') => out += &format!("{day:02}"),
            Some('H') => out += &format!("{hour:02}"),
            Some('I') => out += &format!("{hour12:02}"),
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{second:02}"),
            Some('p') => out += if hour < 12 { "AM" } else { "PM" },
            Some('B') => out += month_name,
            Some('b') => out += &month_name[..3],
            Some('A') => out += day_name,
            Some('a') => out += &day_name[..3],
            // glibc: without padding
            Some('-') => match chars.next() {
                Some('d') => out += &day.to_string(),
                Some('m') => out += &month.to_string(),
                Some('H') => out += &hour.to_string(),
                Some('I') => out += &hour12.to_string(),
                _ => return Err(bad("strftime_now: unknown directive")),
            },
            Some('%') => out.push('%'),
            _ => return Err(bad("strftime_now: unknown directive")),
        }
    }
    Ok(out)
}
