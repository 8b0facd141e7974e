//! What only control may ask for: SEAL, DELETE, STAT, PIN, UNPIN, LIST and SCRUB.

use gd2fs_store::Store;
use gd2fs_transport::Frame;
use gd2fs_wire::capability::parse_file_id;
use gd2fs_wire::messages::{
    ColumnName, DeleteReply, ITEMS_MAX, Items, PinItem, PinReply, SealItem, SealReply, UnpinItem, UnpinReply,
};
use gd2fs_wire::{Code, Failure, Opcode, Role};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::{Connection, Reply, Stop, check_expiry};

/// Keeps a reply of 4,096 items under the 4 MiB of a control payload.
const MESSAGE_CHARACTERS_MAX: usize = 200;

impl Connection<'_> {
    pub(crate) async fn control(&mut self, frame: &Frame, opcode: Opcode) -> Result<Reply, Stop> {
        if self.token.role != Role::Control {
            let message = format!("{opcode:?} needs a token with role \"control\"");
            return Err(Failure::new(Code::Forbidden, message).into());
        }
        check_expiry(self.shared.store.clock(), self.token.expiry, "token")?;
        let payload = self.receiver.json(frame).await?;
        self.unread = 0;
        let store = &self.shared.store;
        if opcode == Opcode::Seal {
            let reply = seal(store, items(&payload)?).await;
            return Ok(Reply::Json(Frame::new(self.reply(&frame.header)), reply));
        }
        // Tombstones are synced to disk: not on a thread that others wait for.
        let reply = tokio::task::block_in_place(|| match opcode {
            Opcode::Delete => delete(store, items(&payload)?),
            Opcode::Stat => stat(store, items(&payload)?),
            Opcode::Pin => pin(store, items(&payload)?),
            Opcode::Unpin => unpin(store, items(&payload)?),
            Opcode::List => Ok(to_json(&store.list(&parse(&payload)?)?)),
            Opcode::Scrub => Ok(to_json(&store.scrub(&parse(&payload)?))),
            other => Err(Failure::new(Code::UnknownOpcode, format!("{other:?} is not for control"))),
        })?;
        Ok(Reply::Json(Frame::new(self.reply(&frame.header)), reply))
    }
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(payload)
        .map_err(|error| Failure::new(Code::BadRequest, format!("the payload is not understood: {error}")))
}

fn items<T: DeserializeOwned>(payload: &[u8]) -> Result<Vec<T>, Failure> {
    let Items { items } = parse::<Items<T>>(payload)?;
    if items.len() > ITEMS_MAX {
        return Err(Failure::new(
            Code::BadRequest,
            format!("{} items, at most {ITEMS_MAX} are taken", items.len()),
        ));
    }
    Ok(items)
}

fn to_json(reply: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(reply).expect("plain data serialises")
}

fn replies<T: Serialize>(items: impl Iterator<Item = T>) -> Vec<u8> {
    to_json(&Items { items: items.collect() })
}

fn cut(message: &str) -> String {
    message.chars().take(MESSAGE_CHARACTERS_MAX).collect()
}

/// In order, as control asks for it: the ids of a file before the KV cache that they describe.
async fn seal(store: &Store, items: Vec<SealItem>) -> Vec<u8> {
    let mut sealed = Vec::with_capacity(items.len());
    for item in &items {
        sealed.push(match store.seal(item).await {
            Ok(sealed) => SealReply { status: Code::Ok as u32, sealed, message: String::new() },
            Err(failure) => {
                SealReply { status: failure.code as u32, sealed: 0, message: cut(&failure.message) }
            }
        });
    }
    replies(sealed.into_iter())
}

fn names(items: &[ColumnName]) -> Result<Vec<(u128, u32)>, Failure> {
    items.iter().map(|item| Ok((parse_file_id(&item.file)?, item.column))).collect()
}

fn delete(store: &Store, items: Vec<ColumnName>) -> Result<Vec<u8>, Failure> {
    let freed = store.delete(&names(&items)?)?;
    Ok(replies(freed.into_iter().map(|freed| DeleteReply { freed })))
}

fn stat(store: &Store, items: Vec<ColumnName>) -> Result<Vec<u8>, Failure> {
    Ok(replies(names(&items)?.into_iter().map(|(file, column)| store.stat(file, column))))
}

fn pin(store: &Store, items: Vec<PinItem>) -> Result<Vec<u8>, Failure> {
    Ok(replies(items.iter().map(|item| {
        let reply = store.pin(item);
        PinReply { message: cut(&reply.message), ..reply }
    })))
}

fn unpin(store: &Store, items: Vec<UnpinItem>) -> Result<Vec<u8>, Failure> {
    let unpinned: Vec<UnpinReply> = items.iter().map(|item| store.unpin(item)).collect::<Result<_, _>>()?;
    Ok(replies(unpinned.into_iter()))
}
