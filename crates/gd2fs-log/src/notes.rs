//! Notes that wait together are written and made durable together.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::entry::Note;
use crate::error::{LogError, Result};
use crate::inner::Inner;
use crate::record::{Body, NOTES_MAX};
use crate::state::Class;

/// Notes that wait at once; more are refused. Some 80 groups, or a fraction of a second of any disk.
const WAITING_MAX: usize = 4096;

/// A note, or nothing but the wish to know when all before it are answered.
type Item = (Option<Note>, oneshot::Sender<Result<()>>);

#[derive(Default)]
pub(crate) struct Waiting {
    queue: VecDeque<Item>,
    committing: bool,
}

impl Inner {
    /// Queues a note; what is returned is told when it is durable. It is carried out whether or not anybody listens.
    pub fn note(self: &Arc<Self>, note: Option<Note>) -> oneshot::Receiver<Result<()>> {
        if let Some(note) = note {
            self.state.lock().announce(note);
        }
        let (tell, told) = oneshot::channel();
        let mut waiting = self.notes.lock();
        if waiting.queue.len() >= WAITING_MAX && note.is_some() {
            let _ = tell.send(Err(LogError::Overloaded));
            return told;
        }
        waiting.queue.push_back((note, tell));
        if !std::mem::replace(&mut waiting.committing, true) {
            self.runtime.spawn(Arc::clone(self).commit());
        }
        told
    }

    /// Writes group after group until no note waits.
    async fn commit(self: Arc<Self>) {
        loop {
            let group: Vec<Item> = {
                let mut waiting = self.notes.lock();
                let count = waiting.queue.len().min(NOTES_MAX);
                waiting.committing = count > 0;
                waiting.queue.drain(..count).collect()
            };
            if group.is_empty() {
                return;
            }
            let notes: Vec<Note> = group.iter().filter_map(|(note, _)| *note).collect();
            let result = match notes.is_empty() {
                true => Ok(()),
                false => self.append_durably(Class::Note, &Body::Notes(notes)).await,
            };
            for (_, tell) in group {
                let _ = tell.send(result.clone());
            }
        }
    }

    /// Appends a record without payload and makes it durable.
    pub async fn append_durably(self: &Arc<Self>, class: Class, body: &Body) -> Result<()> {
        self.append(self.begin(), class, body, None, None).await?;
        self.sync().await
    }
}
