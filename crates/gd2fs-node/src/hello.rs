//! The first frame of a connection: who is there, and which protocol is spoken.

use std::time::Duration;

use gd2fs_transport::{Batch, Frame, Receiver, Stream};
use gd2fs_wire::capability::parse_file_id;
use gd2fs_wire::header::{PAYLOAD_BYTES_MAX, VERSION};
use gd2fs_wire::messages::{Hello, HelloReply};
use gd2fs_wire::{Code, Failure, Opcode, Role, Token};
use tokio::time::timeout;

use crate::connection::check_expiry;
use crate::fences::Membership;
use crate::server::Shared;

/// A connection that has not said who it is holds a place for this long at most.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// Tenant of everybody where the development key is in use and no token was given.
const DEVELOPMENT_TENANT: &str = "default";

/// None: the connection has been told why, where it could be, and ends here.
pub(crate) async fn greet(
    receiver: &mut Receiver,
    stream: &Stream,
    shared: &Shared,
) -> Option<(Token, Membership)> {
    timeout(HELLO_TIME, greeting(receiver, stream, shared)).await.ok().flatten()
}

async fn greeting(receiver: &mut Receiver, stream: &Stream, shared: &Shared) -> Option<(Token, Membership)> {
    let incarnation = shared.store.incarnation();
    let header = match receiver.header().await {
        Ok(header) => header,
        Err(gd2fs_transport::FrameError::Refused { header, failure }) => {
            // Another protocol version: the one case in which a stranger gets an answer that helps.
            shared.stats.refused(&failure);
            let _ = say(stream, Frame::refusal(&header, incarnation, &failure)).await;
            return None;
        }
        Err(_) => return None,
    };
    if header.opcode != Opcode::Hello as u8 || header.is_response() || header.payload_bytes() > 0 {
        return None;
    }
    let frame = receiver.rest(header).await.ok()?;
    match admit(&frame, shared) {
        Ok(admitted) => {
            let reply = HelloReply {
                version: VERSION,
                features: 0,
                node: shared.config.node.clone(),
                cluster: shared.config.cluster.clone(),
                incarnation,
                payload_bytes_max: PAYLOAD_BYTES_MAX,
            };
            let reply = Frame::with_message(header.reply(incarnation, Code::Ok), &reply).ok()?;
            say(stream, reply).await.ok()?;
            Some(admitted)
        }
        Err(failure) => {
            shared.stats.refused(&failure);
            // The connection ends anyway; a peer that has gone needs no answer.
            let _ = say(stream, Frame::refusal(&header, incarnation, &failure)).await;
            None
        }
    }
}

async fn say(stream: &Stream, frame: Frame) -> std::io::Result<()> {
    let mut batch = Batch::default();
    batch.push(frame);
    // SAFETY: it has no payload.
    unsafe { batch.send(stream) }.await
}

fn admit(frame: &Frame, shared: &Shared) -> Result<(Token, Membership), Failure> {
    let hello: Hello = frame.message()?;
    let (lowest, highest) = hello.versions;
    if !(lowest..=highest).contains(&VERSION) {
        let message = format!("versions {lowest} to {highest} are not spoken here, only {VERSION}");
        return Err(Failure::new(Code::Version, message));
    }
    if hello.cluster != shared.config.cluster {
        let (asked, mine) = (hello.cluster, &shared.config.cluster);
        return Err(Failure::new(
            Code::WrongCluster,
            format!("this node is of cluster {mine:?}, not {asked:?}"),
        ));
    }
    let token = authenticate(&hello.token, shared)?;
    let client = parse_file_id(&hello.client).map_err(|_| {
        Failure::new(Code::BadRequest, format!("client {:?} is not 32 hex digits", hello.client))
    })?;
    let membership = shared.fences.join((client, hello.slot), hello.generation)?;
    Ok((token, membership))
}

fn authenticate(text: &str, shared: &Shared) -> Result<Token, Failure> {
    if text.is_empty() {
        // The development key is only ever in use where all listeners are on loopback.
        if shared.keys.is_development() {
            return Ok(Token { tenant: DEVELOPMENT_TENANT.into(), role: Role::Client, expiry: u64::MAX });
        }
        return Err(Failure::new(Code::Unauthenticated, "no token; set GD2FS_TOKEN or GD2FS_TOKEN_FILE"));
    }
    let token: Token = shared.keys.verify(text)?;
    check_expiry(shared.store.clock(), token.expiry, "token")?;
    Ok(token)
}
