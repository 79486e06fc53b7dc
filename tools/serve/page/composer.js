// The box for new messages and the files that go with them.
import * as answers from './answers.js';
import { $, element, iconButton, toast } from './dom.js';
import * as model from './model.js';
import { server } from './settings.js';
import { current, follow, lastTurn } from './thread.js';
import { growBox } from './turn.js';

const kLargestFile = 4 << 20, kLargestImage = 20 << 20, kTitle = 60;
const kImages = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp'];
let files = [], go = () => {};

const draftKey = () => 'quern.draft.' + (current() ?? '');

function keepDraft() {
  try {
    if ($('text').value) sessionStorage.setItem(draftKey(), $('text').value);
    else sessionStorage.removeItem(draftKey());
  } catch { /* it is only in the box then */ }
}

/// After another conversation is shown.
export function showDraft() {
  $('text').value = sessionStorage.getItem(draftKey()) ?? '';
  growBox($('text'));
  drawButton();
}

export function drawButton() {
  const busy = current() !== null && answers.runningIn(current()) !== undefined;
  $('send').textContent = busy ? 'Stop' : 'Send';
  $('send').classList.toggle('stop', busy);
  $('send').disabled = !busy && !$('text').value.trim() && files.length === 0;
}

function drawFiles() {
  $('attached').replaceChildren(...files.map(file => element('span', { className: 'chip' },
    file.image ? element('img', { src: file.image, alt: '' }) : '', file.name,
    iconButton('close', `Leave out ${file.name}`, () => { files = files.filter(f => f !== file); drawFiles(); }))));
  drawButton();
}

async function readText(file) {
  if (file.size > kLargestFile) throw new Error(`${file.name} is larger than ${kLargestFile >> 20} MiB.`);
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes('\0')) throw new Error();
    return text;
  } catch {
    throw new Error(`${file.name} is neither a text file (UTF-8) nor an image.`);
  }
}

async function readImage(file) {
  if (!server.props?.modalities?.vision) throw new Error(`${file.name} is an image, and this model reads text only.`);
  if (file.size > kLargestImage) throw new Error(`${file.name} is larger than ${kLargestImage >> 20} MiB.`);
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

export async function attach(list) {
  for (const file of list) {
    try {
      const read = kImages.includes(file.type) ? { image: await readImage(file) } : { text: await readText(file) };
      files.push({ name: file.name, ...read });
    } catch (error) {
      toast(error.message);
    }
  }
  drawFiles();
  $('text').focus();
}

function titleOf(text) {
  const line = text.trim().split('\n')[0] || files[0]?.name || 'Conversation';
  return line.length > kTitle ? line.slice(0, kTitle - 1).trimEnd() + '…' : line;
}

async function send() {
  const content = $('text').value.trim();
  if (!content && files.length === 0) return;
  const leaving = draftKey(), chat = current() ?? model.newChat(titleOf(content)), parent = model.path(chat).at(-1)?.id ?? null;
  const made = model.add({ chat, parent, role: 'user', content, ...(files.length ? { files } : {}) });
  sessionStorage.removeItem(leaving);
  $('text').value = '';
  files = [];
  drawFiles();
  growBox($('text'));
  answers.begin(chat, made.id);
  if (chat !== current()) await go(chat);
  follow();
  drawButton();
}

function onKey(event) {
  const plain = !event.shiftKey && !event.isComposing && !event.altKey;
  if (event.key === 'Enter' && plain) {
    event.preventDefault();
    if (!answers.runningIn(current())) send();
  }
  if (event.key === 'ArrowUp' && plain && $('text').value === '') {
    event.preventDefault();
    lastTurn('user')?.edit();
  }
}

function watchDrops() {
  let depth = 0;
  const has = event => event.dataTransfer?.types.includes('Files');
  const over = by => { depth = Math.max(0, depth + by); $('dropping').hidden = depth === 0; };
  addEventListener('dragenter', event => { if (has(event)) over(1); });
  addEventListener('dragleave', event => { if (has(event)) over(-1); });
  addEventListener('dragover', event => { if (has(event)) event.preventDefault(); });
  addEventListener('drop', event => {
    if (!has(event)) return;
    event.preventDefault();
    depth = 0;
    over(0);
    attach(event.dataTransfer.files);
  });
  $('text').addEventListener('paste', event => {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
}

export function start(goTo) {
  go = goTo;
  $('form').onsubmit = event => {
    event.preventDefault();
    if (current() && answers.runningIn(current())) answers.stop(current());
    else send();
  };
  $('text').oninput = () => { growBox($('text')); keepDraft(); drawButton(); };
  $('text').onkeydown = onKey;
  $('attach').onclick = () => $('files').click();
  $('files').onchange = () => { attach([...$('files').files]); $('files').value = ''; };
  model.events.addEventListener('message', event => { if (event.detail.chat === current()) drawButton(); });
  watchDrops();
  showDraft();
}
