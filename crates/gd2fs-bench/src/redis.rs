//! A Redis reader as fast as we can make it: the competitor deserves a compiled client of our client's shape.
//!
//! GETs of values whose length is known beforehand. So everything about the stream of replies is known but the values: each
//! `recvmsg` scatters as much as has come, many replies at a time, the values straight into their places and the little
//! around them into a scratch that is compared with what it must be.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use gd2fs_transport::Slice;

use crate::socket::{checked, local, prepare, send, timeout_named};
use crate::together::together;

const CONNECTIONS_MAX: usize = 64;
/// Two for each reply; the kernel takes up to 1,024, and beyond some dozens nothing is gained.
const VECTORS_MAX: usize = 256;
const END: &[u8] = b"\r\n";

/// Connections to one server, ready for any number of runs.
pub struct Reader {
    connections: Vec<TcpStream>,
}

impl Reader {
    pub fn connect(address: SocketAddr, connections: usize) -> io::Result<Reader> {
        if !(1..=CONNECTIONS_MAX).contains(&connections) {
            return Err(io::Error::other(format!(
                "connections: {connections} is not in 1..{CONNECTIONS_MAX}"
            )));
        }
        let connect = || {
            let stream = TcpStream::connect(address)?;
            prepare(&stream, None)?;
            Ok(stream)
        };
        Ok(Reader { connections: (0..connections).map(|_| connect()).collect::<io::Result<_>>()? })
    }

    /// Gets the values of `keys`, each `value_bytes` long, one behind the other into `memory`, with up to `depth` GETs
    /// unanswered on each connection. Each connection has a thread and takes a contiguous share. Returns the time that took.
    ///
    /// After an error the connections are out of step: drop the reader.
    ///
    /// # Safety
    /// Nobody else uses `memory` during the call.
    pub unsafe fn get(
        &self,
        keys: &[Vec<u8>],
        value_bytes: usize,
        memory: Slice,
        depth: usize,
    ) -> io::Result<Duration> {
        if value_bytes == 0 || depth == 0 || keys.len().checked_mul(value_bytes) != Some(memory.len()) {
            return Err(io::Error::other(
                "the memory holds exactly the values of all keys; depth is above 0",
            ));
        }
        let share = keys.len().div_ceil(self.connections.len()).max(1);
        let works = keys
            .chunks(share)
            .zip(&self.connections)
            .enumerate()
            .map(|(index, (keys, stream))| {
                let place = memory.part(index * share * value_bytes, keys.len() * value_bytes);
                let mut get = Get::new(keys, value_bytes, place);
                // SAFETY: the caller's promise; the places are disjoint.
                move || unsafe { get.run(stream, depth) }
            })
            .collect();
        let (time, results) = together(works);
        results.into_iter().collect::<io::Result<()>>()?;
        Ok(time)
    }
}

/// The GETs of one connection.
struct Get {
    memory: Slice,
    value_bytes: usize,
    /// All commands, encoded, and where each ends.
    commands: Vec<u8>,
    command_ends: Vec<usize>,
    /// What stands before each value.
    head: Vec<u8>,
    /// For every reply its head and its end, in the order of the stream.
    scratch: Vec<u8>,
    /// Bytes of the stream of replies that have arrived.
    received: usize,
    /// Heads compared so far.
    checked: usize,
}

impl Get {
    fn new(keys: &[Vec<u8>], value_bytes: usize, memory: Slice) -> Get {
        let (mut commands, mut command_ends) = (Vec::new(), Vec::with_capacity(keys.len()));
        for key in keys {
            commands.extend_from_slice(format!("*2\r\n$3\r\nGET\r\n${}\r\n", key.len()).as_bytes());
            commands.extend_from_slice(key);
            commands.extend_from_slice(END);
            command_ends.push(commands.len());
        }
        let head = format!("${value_bytes}\r\n").into_bytes();
        let scratch = vec![0; keys.len() * (head.len() + END.len())];
        Get { memory, value_bytes, commands, command_ends, head, scratch, received: 0, checked: 0 }
    }

    /// Bytes of a whole reply.
    fn unit(&self) -> usize {
        self.head.len() + self.value_bytes + END.len()
    }

    /// # Safety
    /// Nobody else uses the memory during the call.
    unsafe fn run(&mut self, stream: &TcpStream, depth: usize) -> io::Result<()> {
        let count = self.command_ends.len();
        let (mut asked, mut done) = (0, 0);
        while done < count {
            // In batches of half the depth: the server always has something to do, and both ends save system calls.
            if asked < count && asked - done <= depth / 2 {
                let upto = count.min(done + depth);
                let start = if asked == 0 { 0 } else { self.command_ends[asked - 1] };
                let end = self.command_ends[upto - 1];
                // SAFETY: our own buffer.
                unsafe { send(stream, [local(&mut self.commands[start..end])]) }?;
                asked = upto;
            }
            // SAFETY: the caller's promise.
            unsafe { self.receive(stream, asked) }?;
            done = self.received / self.unit();
            self.check()?;
        }
        Ok(())
    }

    /// One system call that takes what has come of the replies below `asked`.
    ///
    /// # Safety
    /// As of `run`.
    unsafe fn receive(&mut self, stream: &TcpStream, asked: usize) -> io::Result<()> {
        let mut vectors = self.vectors(asked);
        // SAFETY: all zeros is a message without addresses; the vectors lie in our scratch and in the caller's memory.
        let got = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = vectors.as_mut_ptr();
            message.msg_iovlen = vectors.len();
            libc::recvmsg(stream.as_raw_fd(), &raw mut message, 0)
        };
        match checked(got) {
            Ok(0) => {
                return Err(io::Error::new(ErrorKind::UnexpectedEof, "the server closed the connection"));
            }
            Ok(got) => self.received += got,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(timeout_named(error)),
        }
        Ok(())
    }

    /// Where the next bytes of the stream go, up to the end of reply `asked`.
    fn vectors(&mut self, asked: usize) -> Vec<libc::iovec> {
        let (unit, head, around) = (self.unit(), self.head.len(), self.head.len() + END.len());
        let mut vectors: Vec<libc::iovec> = Vec::with_capacity(VECTORS_MAX);
        let mut at = self.received;
        while at < asked * unit && vectors.len() < VECTORS_MAX {
            let (reply, inside) = (at / unit, at % unit);
            let (base, length) = if inside >= head && inside < head + self.value_bytes {
                let place = self
                    .memory
                    .part(reply * self.value_bytes + inside - head, head + self.value_bytes - inside);
                (place.address(), place.len())
            } else {
                // The end of a reply and the head of the next are one piece, as they are in the stream.
                let start = if inside < head { inside } else { inside - self.value_bytes };
                let length = if inside < head { head } else { around } - start;
                let next_head = if inside < head || reply + 1 == asked { 0 } else { head };
                (self.scratch[reply * around + start..].as_mut_ptr(), length + next_head)
            };
            vectors.push(libc::iovec { iov_base: base.cast(), iov_len: length });
            at += length;
        }
        vectors
    }

    /// Compares heads as soon as they are there: a nil or an error in place of a value shifts everything behind it.
    fn check(&mut self) -> io::Result<()> {
        let around = self.head.len() + END.len();
        while self.checked < self.command_ends.len()
            && self.checked * self.unit() + self.head.len() <= self.received
        {
            let start = self.checked * around;
            let head = &self.scratch[start..start + self.head.len()];
            let end_before = start.checked_sub(END.len()).map_or(END, |from| &self.scratch[from..start]);
            if head != self.head || end_before != END {
                let text = String::from_utf8_lossy(head).trim_end().to_owned();
                let expected = self.value_bytes;
                return Err(io::Error::other(format!(
                    "a value of {expected} bytes was expected, not {text:?}"
                )));
            }
            self.checked += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn value(key: &str, length: usize) -> Vec<u8> {
        (0..length).map(|i| (i * 31) as u8 ^ key.as_bytes()[i % key.len()]).collect()
    }

    /// Answers GETs in pieces of odd sizes; the key "none" does not exist.
    fn server(length: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                thread::spawn(move || answer(&stream.unwrap(), length));
            }
        });
        address
    }

    fn answer(stream: &TcpStream, length: usize) {
        stream.set_nodelay(true).unwrap();
        stream.set_nodelay(true).unwrap();
        let (mut lines, mut stream) = (BufReader::new(stream.try_clone().unwrap()), stream);
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 {
            assert_eq!(line, "*2\r\n");
            let mut rest = vec![0; "$3\r\nGET\r\n$4\r\n".len()];
            lines.read_exact(&mut rest).unwrap();
            let mut key = [0; 6];
            lines.read_exact(&mut key).unwrap();
            let key = String::from_utf8_lossy(&key[..4]).into_owned();
            let reply = match key.as_str() {
                "none" => b"$-1\r\n".to_vec(),
                _ => [format!("${length}\r\n").as_bytes(), &value(&key, length), END].concat(),
            };
            for piece in reply.chunks(length / 3 + 1) {
                stream.write_all(piece).unwrap();
            }
            line.clear();
        }
    }

    fn run(keys: &[&str], length: usize, connections: usize, depth: usize) -> io::Result<Vec<u8>> {
        let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
        let mut target = vec![0; keys.len() * length];
        let reader = Reader::connect(server(length), connections)?;
        // SAFETY: a local buffer.
        unsafe { reader.get(&keys, length, local(&mut target), depth) }?;
        Ok(target)
    }

    #[test]
    fn values_arrive_in_their_places() {
        let keys: Vec<String> = (1000..1300).map(|number| number.to_string()).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        for (length, connections, depth) in [(1, 1, 1), (5, 1, 64), (4096, 1, 64), (70_000, 3, 2)] {
            let expected: Vec<u8> = keys.iter().flat_map(|key| value(key, length)).collect();
            assert!(run(&keys, length, connections, depth).unwrap() == expected, "{length}");
        }
    }

    #[test]
    fn a_missing_key_is_named_at_once() {
        let error = run(&["1000", "none", "1001"], 1000, 1, 3).unwrap_err();
        assert!(error.to_string().contains("$-1"), "{error}");
    }
}
