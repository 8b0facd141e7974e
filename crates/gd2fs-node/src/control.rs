//! SEAL, DELETE and STAT, which only control may ask for.

use gd2fs_store::Store;
use gd2fs_transport::Frame;
use gd2fs_wire::capability::parse_file_id;
use gd2fs_wire::messages::{ColumnName, DeleteReply, ITEMS_MAX, Items, SealItem, SealReply};
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
        check_expiry(self.token.expiry, "token")?;
        let payload = self.receiver.json(frame).await?;
        self.unread = 0;
        let store = &self.shared.store;
        // Epochs and tombstones are synced to disk: not on a thread that others wait for.
        let reply = tokio::task::block_in_place(|| match opcode {
            Opcode::Seal => seal(store, parse(&payload)?),
            Opcode::Delete => delete(store, parse(&payload)?),
            _ => stat(store, parse(&payload)?),
        })?;
        Ok(Reply::Json(Frame::new(self.reply(&frame.header)), reply))
    }
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> Result<Vec<T>, Failure> {
    let Items { items } = serde_json::from_slice::<Items<T>>(payload)
        .map_err(|error| Failure::new(Code::BadRequest, format!("the payload is not understood: {error}")))?;
    if items.len() > ITEMS_MAX {
        return Err(Failure::new(
            Code::BadRequest,
            format!("{} items, at most {ITEMS_MAX} are taken", items.len()),
        ));
    }
    Ok(items)
}

fn to_json<T: Serialize>(items: Vec<T>) -> Vec<u8> {
    serde_json::to_vec(&Items { items }).expect("plain data serialises")
}

fn seal(store: &Store, items: Vec<SealItem>) -> Result<Vec<u8>, Failure> {
    let replies = items.iter().map(|item| match store.seal(item) {
        Ok(sealed) => SealReply { status: Code::Ok as u32, sealed, message: String::new() },
        Err(failure) => SealReply {
            status: failure.code as u32,
            sealed: 0,
            message: failure.message.chars().take(MESSAGE_CHARACTERS_MAX).collect(),
        },
    });
    Ok(to_json(replies.collect()))
}

fn names(items: &[ColumnName]) -> Result<Vec<(u128, u32)>, Failure> {
    items.iter().map(|item| Ok((parse_file_id(&item.file)?, item.column))).collect()
}

fn delete(store: &Store, items: Vec<ColumnName>) -> Result<Vec<u8>, Failure> {
    let freed = store.delete(&names(&items)?)?;
    Ok(to_json(freed.into_iter().map(|freed| DeleteReply { freed }).collect()))
}

fn stat(store: &Store, items: Vec<ColumnName>) -> Result<Vec<u8>, Failure> {
    Ok(to_json(names(&items)?.into_iter().map(|(file, column)| store.stat(file, column)).collect()))
}
