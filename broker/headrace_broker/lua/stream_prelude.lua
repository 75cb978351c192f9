-- Shared by the stream scripts. An entry is {id, {name, value, ...}}. Its id is <attempt>-<tokens so far>: the tokens
-- of all choices and attempts, including this entry's.

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

local function last_entry(key, below)
  return redis.call('XREVRANGE', key, below, '-', 'COUNT', 1)[1]
end

local function split_id(id)
  local attempt, offset = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(attempt), tonumber(offset)
end

-- Returns the last entry (nil if there is no stream), its attempt, and the tokens that all attempts have generated.
local function tail(key)
  local last = last_entry(key, '+')
  if not last then return nil, 0, 0 end
  local attempt = split_id(last[1])
  -- a start entry has no token count, so the last entry of an earlier attempt gives it
  local entry = last
  while entry and field(entry, 'type') == 'start' do
    entry = last_entry(key, '(' .. entry[1])
  end
  if not entry then return last, attempt, 0 end
  local _, offset = split_id(entry[1])
  if field(entry, 'type') == 'end' then offset = offset - 1 end
  return last, attempt, offset
end

-- A stream belongs to the message whose content digest its first entry has, and to the queue whose digest it has: the
-- first CONTENT_DIGITS of `content`, and the others. The entry of a cancellation has neither, and that of a worker of an
-- earlier version no queue: then it belongs to any.
local function is_of_another(key, content)
  local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  local readable, data = pcall(cmsgpack.unpack, first and field(first, 'data') or '')
  if not readable or type(data) ~= 'table' or type(data.content) ~= 'string' then return false end
  local queue = string.sub(content, CONTENT_DIGITS + 1)
  return data.content ~= string.sub(content, 1, CONTENT_DIGITS) or (data.queue or queue) ~= queue and queue ~= ''
end

-- No worker reaches so many attempts or tokens. An id has 64 bits for each, and Lua is exact up to 2^53.
local HIGHEST_COUNT = 1000000000

-- Returns the values of `tail`, and 0. If the last id is so high that none can follow, deletes the stream and returns 1
-- as the fourth value.
local function usable_tail(key)
  local last, attempt, tokens = tail(key)
  if attempt < HIGHEST_COUNT and tokens < HIGHEST_COUNT then return last, attempt, tokens, 0 end
  redis.call('DEL', key)
  return nil, 0, 0, 1
end

local function append(key, attempt, offset, kind, data)
  redis.call('XADD', key, string.format('%.0f-%.0f', attempt, offset), 'type', kind, 'data', data)
end
