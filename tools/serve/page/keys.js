// Keyboard shortcuts, and the list of them.
import * as answers from './answers.js';
import { $, copy, element, iconButton } from './dom.js';
import { openSettings } from './settings.js';
import { neighbour, toggleSidebar } from './sidebar.js';
import { current, lastTurn } from './thread.js';

const kApple = /Mac|iP(hone|ad)/.test(navigator.platform), kMain = kApple ? '⌘' : 'Ctrl';
let go = () => {};

// [keys as they are shown, what they do, whether an event is them, what runs]
const main = event => (kApple ? event.metaKey : event.ctrlKey) && !event.altKey;
const alt = event => event.altKey && !event.ctrlKey && !event.metaKey;
const bare = event => !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest('input, textarea, select');
const kKeys = [
  [['Enter'], 'send the message', () => false],
  [['Shift', 'Enter'], 'begin a new line', () => false],
  [['↑'], 'in the empty box: edit the last question', () => false],
  [['Esc'], 'stop the answer', e => e.key === 'Escape' && !document.querySelector('dialog[open]'), () => current() && answers.stop(current())],
  [[kMain, 'Shift', 'O'], 'new conversation', e => main(e) && e.shiftKey && e.code === 'KeyO', () => go(null)],
  [[kMain, 'K'], 'search the conversations', e => main(e) && !e.shiftKey && e.code === 'KeyK', () => { toggleSidebar(true); $('search').focus(); $('search').select(); }],
  [['Alt', '↑'], 'the conversation above', e => alt(e) && e.key === 'ArrowUp', () => move(-1)],
  [['Alt', '↓'], 'the conversation below', e => alt(e) && e.key === 'ArrowDown', () => move(1)],
  [[kMain, 'B'], 'show or hide the list', e => main(e) && e.code === 'KeyB', () => toggleSidebar()],
  [['Alt', 'R'], 'answer again', e => alt(e) && e.code === 'KeyR', () => lastTurn('assistant')?.element.querySelector('.regenerate')?.click()],
  [['Alt', 'C'], 'copy the last answer', e => alt(e) && e.code === 'KeyC', () => { const turn = lastTurn('assistant'); if (turn) copy(turn.message.content); }],
  [[kMain, ','], 'settings', e => main(e) && e.key === ',', () => openSettings()],
  [['/'], 'to the message box', e => bare(e) && e.key === '/', () => $('text').focus()],
  [['?'], 'this list', e => bare(e) && e.key === '?', () => showKeys()],
];

function move(by) {
  const to = neighbour(by);
  if (to) go(to);
}

export function showKeys() {
  const rows = kKeys.map(([keys, what]) => element('tr', {},
    element('td', {}, ...keys.flatMap((key, i) => [i ? ' + ' : '', element('kbd', {}, key)])), element('td', {}, what)));
  $('keys').replaceChildren(
    element('div', { className: 'row' }, element('h2', { id: 'keystitle' }, 'Keyboard shortcuts'), iconButton('close', 'Close', () => $('keys').close())),
    element('table', {}, element('tbody', {}, ...rows)));
  if (!$('keys').open) $('keys').showModal();
}

export function start(goTo) {
  go = goTo;
  $('help').onclick = showKeys;
  addEventListener('keydown', event => {
    if (event.isComposing) return;
    const found = kKeys.find(([, , is]) => is(event));
    if (!found) return;
    event.preventDefault();
    found[3]();
  });
}
