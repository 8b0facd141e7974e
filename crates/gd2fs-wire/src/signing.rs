//! Signed text: `gd2fs1.<key id>.<base64url payload>.<base64url HMAC-SHA256>`. Tokens, capabilities and plans share it.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::code::{Code, Failure};

const PREFIX: &str = "gd2fs1";
/// The built-in key: it protects nothing and is accepted on loopback only.
pub const DEVELOPMENT_KEY_ID: u8 = 0;
const KEY_BYTES_MIN: usize = 16;
/// A capability of a file with 1,000 columns stays well below this.
const TEXT_BYTES_MAX: usize = 60_000;

#[derive(Debug, Error)]
pub enum SigningError {
    #[error("GD2FS_CLUSTER_KEYS: {0}; write it as ID:HEX[,ID:HEX…] with ids 1..255 and keys of 16 bytes or more")]
    Keys(String),
}

/// The cluster's keys: the first signs, all verify, so that keys rotate without a stop.
#[derive(Clone)]
pub struct Keys {
    keys: Vec<(u8, Vec<u8>)>,
}

impl Keys {
    pub fn development() -> Keys {
        let key = Sha256::digest(b"gd2fs development key: loopback only").to_vec();
        Keys { keys: vec![(DEVELOPMENT_KEY_ID, key)] }
    }

    /// Parses `GD2FS_CLUSTER_KEYS`; an empty text means the development key.
    pub fn parse(text: &str) -> Result<Keys, SigningError> {
        if text.trim().is_empty() {
            return Ok(Keys::development());
        }
        let mut keys: Vec<(u8, Vec<u8>)> = Vec::new();
        for item in text.split(',') {
            let (id, hex) = item
                .trim()
                .split_once(':')
                .ok_or_else(|| SigningError::Keys(format!("item {} has no ':'", keys.len() + 1)))?;
            let id = id
                .parse::<u8>()
                .ok()
                .filter(|id| *id != DEVELOPMENT_KEY_ID && keys.iter().all(|(other, _)| other != id))
                .ok_or_else(|| SigningError::Keys(format!("key id {id:?} is not a fresh number in 1..255")))?;
            let key = decode_hex(hex)
                .filter(|key| key.len() >= KEY_BYTES_MIN)
                .ok_or_else(|| SigningError::Keys(format!("key {id} is not hex of {KEY_BYTES_MIN} bytes or more")))?;
            keys.push((id, key));
        }
        Ok(Keys { keys })
    }

    pub fn is_development(&self) -> bool {
        self.keys[0].0 == DEVELOPMENT_KEY_ID
    }

    pub fn sign<T: Serialize>(&self, payload: &T) -> String {
        let (id, key) = &self.keys[0];
        let json = serde_json::to_vec(payload).expect("plain data serialises");
        let body = format!("{PREFIX}.{id}.{}", URL_SAFE_NO_PAD.encode(json));
        let signature = URL_SAFE_NO_PAD.encode(mac(key, &body).finalize().into_bytes());
        format!("{body}.{signature}")
    }

    /// Checks the signature, then reads the payload; expiry is the caller's to check, it knows the time.
    pub fn verify<T: DeserializeOwned>(&self, text: &str) -> Result<T, Failure> {
        let refuse = |message: &str| Failure::new(Code::BadSignature, message);
        if text.len() > TEXT_BYTES_MAX {
            return Err(refuse("the signed text is too long"));
        }
        let malformed = || refuse("not a signed text (gd2fs1.KEY.PAYLOAD.SIGNATURE)");
        let (body, signature) = text.rsplit_once('.').ok_or_else(malformed)?;
        let mut parts = body.split('.');
        let (Some(PREFIX), Some(id), Some(payload), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(malformed());
        };
        let id = id.parse::<u8>().map_err(|_| malformed())?;
        let (_, key) = self.keys.iter().find(|(known, _)| *known == id).ok_or_else(|| {
            refuse("signed with a key that is not in GD2FS_CLUSTER_KEYS here")
        })?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| malformed())?;
        // verify_slice compares in constant time.
        mac(key, body).verify_slice(&signature).map_err(|_| refuse("the signature does not match"))?;
        let json = URL_SAFE_NO_PAD.decode(payload).map_err(|_| malformed())?;
        serde_json::from_slice(&json).map_err(|error| refuse(&format!("signed, but not understood: {error}")))
    }
}

fn mac(key: &[u8], body: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(body.as_bytes());
    mac
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || text.len() % 2 != 0 {
        return None;
    }
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).ok()).collect()
}
