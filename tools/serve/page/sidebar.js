// The list of conversations: by day, searched, renamed, deleted.
import * as answers from './answers.js';
import { $, announce, element, iconButton, toast } from './dom.js';
import * as model from './model.js';
import { allMessages } from './store.js';
import { current } from './thread.js';

const kDay = 86400000, kSnippet = 90;
let go = () => {}, renaming = null, drawing = 0;

function groupOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return 'Today';
  if (time >= today - kDay) return 'Yesterday';
  return time >= today - 7 * kDay ? 'The last 7 days' : 'Older';
}

async function remove(chat) {
  answers.stop(chat.id);
  const putBack = await model.removeChat(chat.id);
  if (current() === chat.id) go(null);
  toast(`“${chat.title}” is deleted.`, 'Undo', () => { putBack(); go(chat.id); });
}

function renameBox(chat) {
  const input = element('input', { value: chat.title, 'aria-label': 'Name of the conversation' });
  const end = () => { if (renaming) { renaming = null; draw(); } };
  input.onkeydown = event => {
    if (event.key === 'Enter' && !event.isComposing) { renaming = null; model.rename(chat.id, input.value.trim() || chat.title); }
    if (event.key === 'Escape') { event.stopPropagation(); end(); }
  };
  input.onblur = end;
  queueMicrotask(() => { input.focus(); input.select(); });
  return input;
}

function row(chat, snippet) {
  const here = chat.id === current();
  const open = element('button', { type: 'button', className: 'open', onclick: () => go(chat.id) }, element('span', {}, chat.title));
  if (here) open.setAttribute('aria-current', 'page');
  if (answers.runningIn(chat.id)) open.firstChild.prepend(element('i', { className: 'dot', title: 'An answer is being written' }));
  if (snippet) open.append(element('small', {}, snippet));
  const item = element('li', { className: here ? 'chat here' : 'chat' });
  if (renaming === chat.id) item.append(renameBox(chat));
  else item.append(open, iconButton('edit', `Rename ${chat.title}`, () => { renaming = chat.id; draw(); }),
    iconButton('trash', `Delete ${chat.title}`, () => remove(chat)));
  return item;
}

function snippetOf(text, at) {
  const from = Math.max(0, at - 25);
  return (from > 0 ? '…' : '') + text.slice(from, from + kSnippet).replace(/\s+/g, ' ');
}

/// Conversation → where the words stand; those whose title has them come without.
async function search(words) {
  const found = new Map(), low = words.toLowerCase();
  for (const chat of model.chats.values()) if (chat.title.toLowerCase().includes(low)) found.set(chat.id, '');
  for (const m of await allMessages().catch(() => [])) {
    const at = m.content.toLowerCase().indexOf(low);
    if (at >= 0 && !found.get(m.chat)) found.set(m.chat, snippetOf(m.content, at));
  }
  return found;
}

async function draw() {
  drawing = 0;
  const words = $('search').value.trim(), found = words ? await search(words) : null;
  if (words !== $('search').value.trim()) return;
  const list = [...model.chats.values()].filter(c => !found || found.has(c.id)).sort((a, b) => b.updated - a.updated);
  const groups = new Map();
  for (const chat of list) {
    const name = groupOf(chat.updated);
    if (!groups.has(name)) groups.set(name, element('ul', { 'aria-label': name }));
    groups.get(name).append(row(chat, found?.get(chat.id)));
  }
  const box = $('chats'), top = box.scrollTop;
  box.replaceChildren(...[...groups].flatMap(([name, items]) => [element('h2', {}, name), items]));
  if (list.length === 0) box.append(element('p', { className: 'hint' }, found ? 'Nothing is found.' : 'No conversations yet.'));
  box.scrollTop = top;
  if (found) announce(`${list.length} conversations found`);
}

export function redrawList() { drawing ||= setTimeout(draw, 30); }

/// The conversation above (-1) or below (1) in the list.
export function neighbour(by) {
  const list = [...model.chats.values()].sort((a, b) => b.updated - a.updated);
  const at = list.findIndex(chat => chat.id === current());
  return list[at + by]?.id;
}

export function toggleSidebar(open) {
  const narrow = matchMedia('(max-width: 760px)').matches, name = narrow ? 'open' : 'closed';
  const on = document.body.classList.toggle(name, open === undefined ? undefined : narrow ? open : !open);
  $('shade').hidden = !(narrow && on);
}

export function start(goTo) {
  go = goTo;
  model.events.addEventListener('chats', redrawList);
  $('search').oninput = redrawList;
  $('hide').onclick = () => toggleSidebar(false);
  $('show').onclick = () => toggleSidebar(true);
  $('shade').onclick = () => toggleSidebar(false);
  draw();
}
