// Markdown to elements: marked reads it, DOMPurify lets only harmless elements through, highlight.js colours code, KaTeX
// sets formulas. What the model writes as HTML is shown as text, but for a few tags without attributes.
import './lib/marked.js';
import DOMPurify from './lib/purify.js';
import { copy, element, iconButton } from './dom.js';

const { marked } = globalThis;
// DOMPurify of Debian 12 (2.4.1) reads a variable that it never declares, in its check of how deep a text is nested. Here
// it is, for a text that is not; the nodes of a text are checked apart from this.
globalThis.shadowNode ??= { __depth: 0 };
const kLongestCode = 40000;  // characters that are coloured

const escape = text => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;');
const kHarmless = /&lt;(\/?(?:br|sub|sup|kbd|mark|u|s|b|i|em|strong))\s*(\/?)&gt;/gi;

function mathToken(raw, text, display) { return { type: display ? 'mathBlock' : 'mathInline', raw, text: text.trim(), display }; }
const mathHtml = token => `<span class="math" data-display="${token.display ? 1 : ''}">${escape(token.text)}</span>`;

const mathBlock = {
  name: 'mathBlock', level: 'block', renderer: mathHtml,
  start: source => source.match(/^ {0,3}(?:\$\$|\\\[)/m)?.index,
  tokenizer(source) {
    const found = source.match(/^ {0,3}(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/);
    return found ? mathToken(found[0], found[1] ?? found[2], true) : undefined;
  },
};
const mathInline = {
  name: 'mathInline', level: 'inline', renderer: mathHtml,
  start: source => source.match(/\$|\\\(|\\\[/)?.index,
  tokenizer(source) {
    const wide = source.match(/^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])/);
    if (wide) return mathToken(wide[0], wide[1] ?? wide[2], true);
    // A price is no formula: no blank after the first $ or before the second, no digit after it.
    const found = source.match(/^(?:\$((?:\\.|[^\\$\n\s])(?:(?:\\.|[^\\$\n])*?(?:\\.|[^\\$\n\s]))?)\$(?!\d)|\\\(([^]+?)\\\))/);
    return found ? mathToken(found[0], found[1] ?? found[2], false) : undefined;
  },
};

marked.use({
  gfm: true, breaks: true, headerIds: false, mangle: false,
  extensions: [mathBlock, mathInline],
  renderer: {
    html: text => escape(text).replace(kHarmless, '<$1$2>'),
    heading: (text, level) => `<h${Math.min(6, level + 2)}>${text}</h${Math.min(6, level + 2)}>`,
    image: (address, title, text) => `<a href="${escape(address ?? '')}">${text || 'image'}</a>`,
  },
});

const kAllowed = {
  ALLOWED_TAGS: ['p', 'br', 'hr', 'h3', 'h4', 'h5', 'h6', 'ul', 'ol', 'li', 'blockquote', 'pre', 'code', 'em', 'strong',
    'b', 'i', 'u', 's', 'del', 'a', 'table', 'thead', 'tbody', 'tr', 'th', 'td', 'sub', 'sup', 'kbd', 'mark', 'span', 'input'],
  ALLOWED_ATTR: ['href', 'title', 'class', 'align', 'start', 'type', 'checked', 'disabled', 'data-display'],
  ADD_URI_SAFE_ATTR: ['align', 'start', 'type', 'checked', 'disabled', 'data-display'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
DOMPurify.addHook('uponSanitizeAttribute', (node, data) => {
  if (data.attrName === 'class' && !/^(math|language-[\w+#.-]+|hljs-[\w -]+)$/.test(data.attrValue)) data.keepAttr = false;
});
DOMPurify.addHook('afterSanitizeAttributes', node => {
  if (node.tagName === 'A') { node.target = '_blank'; node.rel = 'noopener noreferrer nofollow'; }
  if (node.tagName === 'INPUT') { node.type = 'checkbox'; node.disabled = true; node.setAttribute('aria-label', 'done'); }
});

let highlighting = null, typesetting = null;
const highlighter = () => highlighting ??= import('./lib/highlight.js').then(() => globalThis.hljs);
const typesetter = () => typesetting ??= import('./lib/katex.js').then(() => globalThis.katex);

function colour(code, language) {
  if (!language || code.textContent.length > kLongestCode) return;
  highlighter().then(hljs => {
    if (!hljs.getLanguage(language)) return;
    const html = hljs.highlight(language, code.textContent, true).value;
    code.replaceChildren(DOMPurify.sanitize(html, { ALLOWED_TAGS: ['span'], ALLOWED_ATTR: ['class'], RETURN_DOM_FRAGMENT: true }));
  }).catch(error => console.warn('not coloured:', error));
}

function codeBox(pre) {
  const code = pre.firstElementChild, language = code.className.replace('language-', '');
  const button = iconButton('copy', 'Copy code', () => copy(code.textContent, button));
  const box = element('div', { className: 'codebox' },
    element('div', { className: 'codehead' }, element('span', {}, language || 'text'), button));
  pre.replaceWith(box);
  pre.tabIndex = 0;
  pre.setAttribute('aria-label', `Code, ${language || 'text'}`);
  pre.setAttribute('role', 'region');
  box.append(pre);
  colour(code, language);
}

function typeset(span) {
  const tex = span.textContent, displayMode = span.dataset.display === '1';
  if (displayMode) span.classList.add('wide');
  typesetter().then(katex => {
    katex.render(tex, span, { displayMode, throwOnError: false, strict: 'ignore', maxSize: 50, maxExpand: 500 });
    span.title = tex;
  }).catch(error => console.warn('not typeset:', error));
}

function renderBlock(token, links) {
  try {
    return tryBlock(token, links);
  } catch (error) {
    console.warn('shown as it is:', error);
    return element('div', { className: 'block plain' }, token.raw);
  }
}

function tryBlock(token, links) {
  const tokens = [token];
  tokens.links = links;
  const part = DOMPurify.sanitize(marked.parser(tokens), kAllowed);
  part.querySelectorAll('pre').forEach(codeBox);
  part.querySelectorAll('.math').forEach(typeset);
  part.querySelectorAll('table').forEach(table => {
    const box = element('div', { className: 'tablebox', tabIndex: 0, role: 'region', 'aria-label': 'Table' });
    table.replaceWith(box);
    box.append(table);
  });
  const block = element('div', { className: 'block' });
  block.append(part);
  return block;
}

/// Shows `text` in `box`. Blocks that did not change since the last call keep their elements, so that a selection holds
/// and a long answer costs little while it grows.
export function renderMarkdown(box, text) {
  const tokens = marked.lexer(text), shown = tokens.filter(token => token.type !== 'space' && token.type !== 'def');
  const definitions = JSON.stringify(tokens.links);
  const before = box.renderedBlocks ?? [], same = box.renderedLinks === definitions;
  let kept = 0;
  while (same && kept < shown.length && before[kept] === shown[kept].raw) ++kept;
  while (box.children.length > kept) box.lastChild.remove();
  for (const token of shown.slice(kept)) box.append(renderBlock(token, tokens.links));
  box.renderedBlocks = shown.map(token => token.raw);
  box.renderedLinks = definitions;
}
