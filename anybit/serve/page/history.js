"use strict";
// Conversations, kept in this browser alone: [{id, title, messages: [{role, content, ...}]}].

const MOST = 100;

const history_ = {
  all: JSON.parse(localStorage.getItem("anybit.conversations") || "[]"),
  now: null,

  // Starts a conversation, which is kept from its first message on.
  begin() {
    this.now = { id: Date.now(), title: "", messages: [] };
    return this.now;
  },

  open(id) {
    this.now = this.all.find(one => one.id === id) || this.begin();
    return this.now;
  },

  save() {
    const one = this.now;
    if (!one.messages.length) return;
    one.title = one.messages[0].content.trim().split("\n")[0].slice(0, 60) || "Untitled";
    this.all = [one, ...this.all.filter(other => other.id !== one.id)].slice(0, MOST);
    this.write();
  },

  remove(id) {
    this.all = this.all.filter(one => one.id !== id);
    this.write();
  },

  // The oldest conversations make room when the browser's storage is full.
  write() {
    for (;;) {
      try {
        localStorage.setItem("anybit.conversations", JSON.stringify(this.all));
        return;
      } catch (error) {
        if (!this.all.length) return;
        this.all.pop();
      }
    }
  },
};
