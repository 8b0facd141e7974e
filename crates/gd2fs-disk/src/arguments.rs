//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

/// Shown with every mistake.
pub const USAGE: &str = "\
usage: gd2fs-disk --backing FILE --bytes N --mount DIR --socket PATH [--seed N] [--parent PID]

Mounts DIR with the file DIR/disk of N bytes over FILE. It is a disk with a write cache: what was not synced is lost
when its power is cut. So it is with files in DIR/data, which are in memory and end with the process. PATH takes commands, one JSON object a line: {\"cut\": true}, {\"restore\": true},
{\"rule\": {\"effect\": \"slow\", \"ms\": 50, \"chance\": 0.5, \"times\": 9, \"on\": [\"write\"]}}, {\"clear\": true},
{\"flip\": {\"offset\": 4096, \"bit\": 3}}, {\"stats\": true}. It ends, unmounted, with SIGTERM, SIGINT or the end of the
process PID (by default the one that started it).";

/// What the disk is started with.
#[derive(Debug, PartialEq)]
pub struct Arguments {
    pub backing: PathBuf,
    pub bytes: u64,
    pub mount: PathBuf,
    pub socket: PathBuf,
    pub seed: u64,
    pub parent: Option<i32>,
}

impl Arguments {
    /// Reads what stands behind the program's name.
    ///
    /// # Errors
    /// A sentence that names the flag.
    pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Arguments, String> {
        let (mut backing, mut bytes, mut mount, mut socket) = (None, None, None, None);
        let (mut seed, mut parent) = (0, None);
        let mut words = words.into_iter();
        while let Some(flag) = words.next() {
            let flag = flag.to_string_lossy().into_owned();
            let value = words.next().ok_or_else(|| format!("{flag}: a value is missing"))?;
            match flag.as_str() {
                "--backing" => backing = Some(PathBuf::from(value)),
                "--mount" => mount = Some(PathBuf::from(value)),
                "--socket" => socket = Some(PathBuf::from(value)),
                "--bytes" => bytes = Some(number(&flag, value)?),
                "--seed" => seed = number(&flag, value)?,
                "--parent" => parent = Some(number(&flag, value)?),
                _ => return Err(format!("{flag}: no such flag")),
            }
        }
        Ok(Arguments {
            backing: backing.ok_or("--backing: needed")?,
            bytes: bytes.ok_or("--bytes: needed")?,
            mount: mount.ok_or("--mount: needed")?,
            socket: socket.ok_or("--socket: needed")?,
            seed,
            parent,
        })
    }
}

fn number<T: std::str::FromStr>(flag: &str, value: OsString) -> Result<T, String> {
    let text = value.to_string_lossy();
    text.parse().map_err(|_| format!("{flag}: {text:?} is no whole number in range"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn flags_are_read_and_mistakes_named() {
        let read = parse("--backing b --bytes 8192 --mount m --socket s --seed 7").unwrap();
        assert_eq!((read.bytes, read.seed, read.parent), (8192, 7, None));
        assert_eq!(read.mount, PathBuf::from("m"));
        assert_eq!(parse("--backing b --mount m --socket s").unwrap_err(), "--bytes: needed");
        assert!(parse("--bytes many").unwrap_err().starts_with("--bytes: \"many\""));
        assert!(parse("--seed").unwrap_err().contains("missing"));
        assert!(parse("--size 3").unwrap_err().contains("no such flag"));
    }
}
