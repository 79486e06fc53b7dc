// The page: puts its parts together, and knows which conversation the address names.
import { get } from './api.js';
import * as composer from './composer.js';
import { $, element, fillIcons, number } from './dom.js';
import * as keys from './keys.js';
import * as model from './model.js';
import { openSettings, server, settings, watchSettings } from './settings.js';
import * as sidebar from './sidebar.js';
import * as thread from './thread.js';
import { exportAll, importFile, importOld, saveMarkdown } from './transfer.js';

const kAskAgainMs = 3000;
let asking = 0;

const named = () => { const id = location.hash.slice(1); return model.chats.has(id) ? id : null; };

/// Shows a conversation; null: an empty one.
async function go(id) {
  const address = id ? '#' + id : location.pathname + location.search;
  if (id !== named() || (id === null && location.hash)) history.pushState(null, '', address);
  await thread.show(id);
  composer.showDraft();
  sidebar.redrawList();
  drawTitle();
  if (matchMedia('(max-width: 760px)').matches) sidebar.toggleSidebar(false);
  else $('text').focus();
}

function drawTitle() {
  const chat = model.chats.get(thread.current()), name = settings.model ?? server.models[0]?.id;
  $('title').textContent = chat?.title ?? (name ? `quern · ${name}` : 'quern');
  document.title = chat ? `${chat.title} · quern` : 'quern';
}

function notice(...parts) {
  $('notice').hidden = parts.length === 0;
  $('notice').replaceChildren(...parts);
}

/// Models and defaults; asks again while the server is away or loading.
async function askServer() {
  clearTimeout(asking);
  try {
    server.models = (await get('v1/models')).data;
    server.props = await get('props');
    notice();
    $('about').textContent = `${server.props.model}, ${server.props.formats}, a context of ${number(server.props.n_ctx)} tokens`;
  } catch (problem) {
    notice(problem.message);
    if (problem.kind === 'key') $('notice').append(' ', element('button', { type: 'button', onclick: () => openSettings('key') }, 'Enter the key'));
    else asking = setTimeout(askServer, kAskAgainMs);
  }
  drawTitle();
}

async function start() {
  fillIcons();
  watchSettings(name => { if (name === 'key' || name === '') askServer(); drawTitle(); });
  addEventListener('storefailed', event => notice(`This browser does not keep the conversations: ${event.detail?.message ?? 'no room'}. Export what you need.`));
  await model.load().then(importOld).catch(error => dispatchEvent(new CustomEvent('storefailed', { detail: error })));
  navigator.storage?.persist?.();  // asks the browser not to drop them when the disk is full
  thread.start(go);
  sidebar.start(go);
  composer.start(go);
  keys.start(go);
  $('new').onclick = () => go(null);
  $('gear').onclick = () => openSettings();
  $('export').onclick = exportAll;
  $('import').onclick = () => $('importfile').click();
  $('importfile').onchange = async () => { await importFile($('importfile').files[0]); $('importfile').value = ''; };
  $('markdown').onclick = () => saveMarkdown(thread.current());
  model.events.addEventListener('chats', () => {
    drawTitle();
    if (thread.current() && !model.chats.has(thread.current())) go(null);
  });
  addEventListener('popstate', () => go(named()));
  await go(named());
  askServer();
}

start();
