//! The command socket: one JSON object a line in, one a line out.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::{fs, io};

use gd2fs_device::Kind;
use gd2fs_device::fault::{Effect, Rule};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::disk::Disk;

/// Longer than any command.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// A test has a few; more wait.
const CONNECTIONS_MAX: usize = 64;

/// What a test asks of the disk, by the object's only key; `true` where there is nothing to say.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Command {
    /// Cuts the power: any subset of what was not synced survives; every call fails from now on.
    Cut(bool),
    /// The power is back.
    Restore(bool),
    /// Adds a rule behind the others.
    Rule(Spec),
    /// Takes all rules away.
    Clear(bool),
    /// Turns one stored bit.
    Flip { offset: u64, bit: u8 },
    /// What was asked of the disk.
    Stats(bool),
}

/// A fault and when it befalls; unless narrowed, every call that it can.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    effect: EffectName,
    /// How much later a slow call begins.
    ms: Option<u64>,
    /// The error number of `error` (default EIO) and `torn` (default none: it claims success).
    code: Option<i32>,
    /// Probability, 0 to 1.
    chance: Option<f64>,
    times: Option<u32>,
    on: Option<Vec<KindName>>,
    /// Bytes of the disk, [from, to).
    within: Option<(u64, u64)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum EffectName {
    Slow,
    Error,
    Flip,
    Torn,
    Lost,
    Short,
    Unsynced,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum KindName {
    Read,
    Write,
    Sync,
    DurableWrite,
}

impl Spec {
    fn rule(self) -> Result<Rule, String> {
        let effect = match self.effect {
            EffectName::Slow => Effect::Slow(Duration::from_millis(
                self.ms.ok_or("rule.ms: a slow rule needs its milliseconds")?,
            )),
            EffectName::Error => Effect::Error(self.code.unwrap_or(libc::EIO)),
            EffectName::Torn => Effect::Torn(self.code),
            EffectName::Flip => Effect::Flip,
            EffectName::Lost => Effect::Lost,
            EffectName::Short => Effect::Short,
            EffectName::Unsynced => Effect::Unsynced,
        };
        let kind = |name: &KindName| match name {
            KindName::Read => Kind::Read,
            KindName::Write => Kind::Write,
            KindName::Sync => Kind::Sync,
            KindName::DurableWrite => Kind::WriteSync,
        };
        let mut rule = Rule::new(effect);
        if let Some(names) = self.on {
            rule = rule.on(&names.iter().map(kind).collect::<Vec<Kind>>());
        }
        if let Some((from, to)) = self.within {
            rule = rule.within(from..to);
        }
        Ok(rule.chance(self.chance.unwrap_or(1.0)).times(self.times.unwrap_or(u32::MAX)))
    }
}

/// Listens at `path`, in the place of a socket that a killed process left.
///
/// # Errors
/// Those of binding; `AddrInUse` if a process listens there.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        let message = format!("{}: another disk listens there; choose another --socket", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(path),
    }
}

/// Answers commands for ever.
pub async fn serve(listener: UnixListener, disk: Arc<Disk>) -> io::Error {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("never closed");
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => return error,
        };
        let disk = Arc::clone(&disk);
        tokio::spawn(async move {
            // A test that goes away in the middle is no fault of the disk.
            let _ = answer(stream, &disk).await;
            drop(place);
        });
    }
}

async fn answer(mut stream: UnixStream, disk: &Disk) -> io::Result<()> {
    let (read, mut write) = stream.split();
    let mut read = BufReader::new(read);
    loop {
        let mut line = String::new();
        if (&mut read).take(LINE_BYTES_MAX).read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let carried = serde_json::from_str(&line).map_err(|error| error.to_string());
        let reply = carried.and_then(|command| carry_out(command, disk));
        let reply = reply.unwrap_or_else(|error| json!({ "error": error }));
        write.write_all(format!("{reply}\n").as_bytes()).await?;
    }
}

fn carry_out(command: Command, disk: &Disk) -> Result<Value, String> {
    let done = Ok(json!({}));
    match command {
        Command::Cut(true) => {
            let cut = disk.power.cut().map_err(|error| format!("the backing file: {error}"))?;
            let lost = disk.files.cut();
            Ok(json!({
                "writes": cut.writes, "sectors": cut.sectors, "sectors_lost": cut.sectors_lost,
                "changes_lost": lost.changes, "files_lost": lost.files,
            }))
        }
        Command::Restore(true) => {
            disk.power.restore();
            disk.files.restore();
            done
        }
        Command::Rule(spec) => Ok(json!({ "rule": disk.faults.add(spec.rule()?) })),
        Command::Clear(true) => {
            disk.faults.clear();
            done
        }
        Command::Flip { offset, bit } if offset < disk.bytes && bit < 8 => {
            disk.power.rot(offset, bit).map_err(|error| format!("the backing file: {error}"))?;
            done
        }
        Command::Flip { .. } => Err(format!("flip: offset must be below {} and bit below 8", disk.bytes)),
        Command::Stats(true) => Ok(stats(disk)),
        Command::Cut(false) | Command::Restore(false) | Command::Clear(false) | Command::Stats(false) => {
            Err("say true, or do not send the command".into())
        }
    }
}

fn stats(disk: &Disk) -> Value {
    let counts = &disk.counts;
    json!({
        "bytes": disk.bytes,
        "power": !disk.power.is_off(),
        "sectors_unsynced": disk.power.sectors_unsynced(),
        "reads": counts.reads.load(Relaxed),
        "bytes_read": counts.bytes_read.load(Relaxed),
        "writes": counts.writes.load(Relaxed),
        "bytes_written": counts.bytes_written.load(Relaxed),
        "durable_writes": counts.durable_writes.load(Relaxed),
        "syncs": counts.syncs.load(Relaxed),
        "under_way_max": disk.faults.under_way_max(),
        "hits": disk.faults.all_hits(),
    })
}
