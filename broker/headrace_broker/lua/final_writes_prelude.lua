-- The writes of a request that has ended (queue/final_writes.py). The script that settles its message makes them, so
-- they are made once. That script declares KEY[], writes[], values[] and numbers[].
local FINAL_COMMANDS = {
  push = 'LPUSH', set = 'SET', answer = 'SET', once = 'SET', delete = 'DEL', claim = 'GET',
}

-- Returns why the writes would be refused, or nil.
local function final_writes_problem()
  for i, key in ipairs(KEY) do
    local command = FINAL_COMMANDS[writes[i]]
    local is_known, may_run = pcall(redis.acl_check_cmd, command, key)
    if not (is_known and may_run) then
      return 'NOPERM this user may not run ' .. command .. ' on the key ' .. string.gsub(key, '%c+', ' ') .. ': permit it'
    end
    local kind = writes[i] == 'push' and 'list' or (writes[i] == 'claim' or writes[i] == 'once') and 'string'
    local problem = kind and problem_of(key, kind)
    if problem then return problem end
  end
end

-- Makes the writes. Their commands are variables, so that `RIGHTS` does not ask for them in calls without such writes.
local function make_final_writes()
  local call, publish, num_skipped = redis.call, 'PUBLISH', 0
  for i, key in ipairs(KEY) do
    local kind, value, number = writes[i], values[i], tonumber(numbers[i])
    local command = FINAL_COMMANDS[kind]
    if num_skipped > 0 then
      num_skipped = num_skipped - 1
    elseif kind == 'push' or kind == 'set' and number == 0 then
      call(command, key, value)
    elseif kind == 'set' then
      call(command, key, value, 'EX', number)
    elseif kind == 'delete' then
      call(command, key)
    elseif kind == 'answer' then
      local is_new
      if number == 0 then is_new = call(command, key, value, 'NX') else is_new = call(command, key, value, 'NX', 'EX', number) end
      if is_new then redis.pcall(publish, key, value) end
    elseif kind == 'once' then
      -- A message whose queue is unknown has no digits of it.
      local before = call(command, key, value, 'EX', SENT_SECONDS, 'GET')
      if before and string.sub(before, 1, CONTENT_DIGITS) == string.sub(value, 1, CONTENT_DIGITS) then num_skipped = number end
    elseif kind == 'claim' then
      local holder = call(command, key)
      if holder and holder ~= value then num_skipped = number end
    end
  end
end
