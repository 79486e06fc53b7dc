// Conversations in the browser's IndexedDB. Each message is a record of its own, and a conversation's record is changed
// within one transaction: what two tabs write never replaces what the other wrote. Every tab hears of every change.
const channel = new BroadcastChannel('quern');
let opening = null, failed = null;

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(10))].map(b => b.toString(16).padStart(2, '0')).join('');
}

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open('quern', 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore('chats', { keyPath: 'id' });
      request.result.createObjectStore('messages', { keyPath: 'id' }).createIndex('chat', 'chat');
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/// Runs `work(chats, messages)` in one transaction; resolves, once all is on disk, to what the request that `work`
/// returned has found.
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(['chats', 'messages'], mode, { durability: 'relaxed' });
    const request = work(transaction.objectStore('chats'), transaction.objectStore('messages'));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

/// Writing that fails must not end an answer: it is noted, and the page says so.
async function write(work, news) {
  try {
    await transact('readwrite', work);
    failed = null;
  } catch (error) {
    failed = error;
    dispatchEvent(new CustomEvent('storefailed', { detail: error }));
  }
  channel.postMessage(news);
}

export const lastFailure = () => failed;
export const allChats = () => transact('readonly', chats => chats.getAll());
export const allMessages = () => transact('readonly', (chats, messages) => messages.getAll());
export const messagesOf = chat => transact('readonly', (chats, messages) => messages.index('chat').getAll(chat));

/// Changes only the named fields; a conversation that another tab has deleted stays deleted.
export function changeChat(id, fields) {
  return write(chats => {
    const found = chats.get(id);
    found.onsuccess = () => { if (found.result) chats.put({ ...found.result, ...fields }); };
  }, { chat: id, fields });
}

/// `fields`: what becomes of its conversation's record at the same time.
export function saveMessage(message, fields = {}) {
  return write((chats, messages) => {
    const found = chats.get(message.chat);
    found.onsuccess = () => {
      if (!found.result) return;
      chats.put({ ...found.result, ...fields });
      messages.put(message);
    };
  }, { message, chat: message.chat, fields });
}

/// Adds or replaces whole records: new conversations, undone deletions, imports.
export function putAll(newChats, newMessages) {
  return write((chats, messages) => {
    for (const chat of newChats) chats.put(chat);
    for (const message of newMessages) messages.put(message);
  }, { chats: newChats, messages: newMessages });
}

export function deleteMessages(chat, ids) {
  return write((chats, messages) => { for (const id of ids) messages.delete(id); }, { chat, gone: ids });
}

export function deleteChat(id) {
  return write((chats, messages) => {
    chats.delete(id);
    const keys = messages.index('chat').getAllKeys(id);
    keys.onsuccess = () => { for (const key of keys.result) messages.delete(key); };
  }, { goneChat: id });
}

/// `hear(news)`: what another tab did, in the form that the functions above send.
export function listen(hear) { channel.onmessage = event => hear(event.data); }
